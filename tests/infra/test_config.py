"""Config files: typed arguments, overrides, where files are looked for, the checks of values, saving and reading back."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from ml_collections import ConfigDict

from gammalm.config import (
    apply_overrides,
    available,
    call,
    from_json,
    leaves,
    load_config,
    load_module,
    to_dict,
    to_json,
    typed_args,
    validate,
)
from gammalm.config_checks import KINDS, NET_RULES, RULES
from gammalm.errors import ConfigError

DEFAULTS = {"size": "tiny", "steps": 10, "lr": 0.5, "tied": True, "mixture": "a"}


@pytest.mark.parametrize(
    "arg, expected",
    [
        ("", {}),
        ("size=big", {"size": "big"}),
        ("steps=1e3", {"steps": 1000}),
        ("steps=12345678901234567", {"steps": 12345678901234567}),  # beyond what a float holds exactly
        ("steps=-4", {"steps": -4}),
        ("lr=3", {"lr": 3.0}),
        ("lr=1e-12", {"lr": 1e-12}),
        ("tied=false,lr=2", {"tied": False, "lr": 2.0}),
        ("tied=0", {"tied": False}),
        ("tied=True", {"tied": True}),
        ("mixture=web:3,code:1,steps=5", {"mixture": "web:3,code:1", "steps": 5}),
    ],
)
def test_typed_args(arg, expected):
    args = typed_args(arg, DEFAULTS, "here")
    assert args == SimpleNamespace(**DEFAULTS | expected)
    assert [type(v) for v in vars(args).values()] == [type(v) for v in DEFAULTS.values()]


@pytest.mark.parametrize(
    "arg, says",
    [
        ("stpes=3", "unknown argument 'stpes'; did you mean steps?"),
        ("zzzzzz=3", "Known arguments: size, steps, lr, tied, mixture"),
        ("steps=1.5", "steps='1.5' is not a whole number"),
        ("steps=many", "is not a whole number"),
        ("steps=inf", "is not a whole number"),
        ("lr=fast", "lr='fast' is not a finite number"),
        ("lr=nan", "is not a finite number"),
        ("lr=1e999", "is not a finite number"),
        ("tied=maybe", "is not true or false"),
        ("tied=2", "is not true or false"),
        ("steps", "'steps' has no value"),
        ("steps=3,4", "'4' has no value"),
        ("steps=3,steps=4", "given twice"),
    ],
)
def test_typed_args_refuses(arg, says):
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        typed_args(arg, DEFAULTS, "here.py")
    assert str(caught.value).startswith("here.py: ")


def test_overrides_take_the_type_of_the_leaf():
    overrides = [
        ("optimizer.learning_rate", "1"),
        ("model.n_layers", "1e1"),
        ("model.tie_embeddings", "false"),
        ("model.dtype", "float32"),
        ("optimizer.no_decay", "norm,embed"),
        ("init.rules", '("**/q=gamma_normal(0.5)",)'),
        ("init.group_gammas", "(1, 0.5, 1, 2)"),
        ("init.gamma", 2),  # what a grid gives: a Python value; an int fills a float
    ]
    c = load_config("lm:size=tiny", overrides)
    assert (c.optimizer.learning_rate, type(c.optimizer.learning_rate)) == (1.0, float)
    assert (c.model.n_layers, type(c.model.n_layers)) == (10, int)
    assert c.model.tie_embeddings is False
    assert c.model.dtype == "float32"
    assert c.optimizer.no_decay == ("norm", "embed")
    assert c.init.rules == ("**/q=gamma_normal(0.5)",)
    assert c.init.group_gammas == (1.0, 0.5, 1.0, 2.0)
    assert (c.init.gamma, type(c.init.gamma)) == (2.0, float)
    assert c.is_locked
    assert apply_overrides(c, [("init.rules", "")]).init.rules == ()
    assert c.init.rules != ()  # the config that was given stays as it was


@pytest.mark.parametrize(
    "name, text, value",
    [
        ("mesh.data", "-1", -1),
        ("batch.sequences", "8.0", 8),
        ("optimizer.clip", "3", 3.0),
        ("optimizer.learning_rate", "-1e-3", -0.001),  # read here, refused by `validate`
        ("optimizer.learning_rate", " 1_000.5 ", 1000.5),
        ("model.tie_embeddings", "FALSE", False),
        ("model.gate", "none", "none"),  # a text like any other
        ("data.path", "", ""),
        ("data.path", "a=b:c,d e", "a=b:c,d e"),
        ("monitor.kinds", "sink", ("sink",)),
        ("monitor.kinds", "sink, flow", ("sink", "flow")),
        ("monitor.kinds", "['sink']", ("sink",)),
        ("monitor.kinds", "()", ()),
        ("downstream.steps", "0,500", (0, 500)),
        ("downstream.steps", "7", (7,)),
        ("init.group_gammas", "1,.5,-1,2e0", (1.0, 0.5, -1.0, 2.0)),
        ("init.rules", "out=zeros", ("out=zeros",)),
    ],
)
def test_awkward_texts_are_read(name, text, value):
    found = leaves(load_config("lm:size=tiny", [(name, text)]))[name]
    assert found == value and type(found) is type(value)
    assert not isinstance(value, tuple) or list(map(type, found)) == list(map(type, value))


@pytest.mark.parametrize(
    "name, value, says",
    [
        ("optimizer.clip", "None", "is not a finite number. Nothing is ever None: 0 stands for it."),
        ("train.validate_every", "null", "is not a whole number. Nothing is ever None"),
        ("optimizer.clip", None, "is not a finite number"),
        ("optimizer.clip", "", "config.optimizer.clip='' is not a finite number"),
        ("optimizer.clip", "1,5", "is not a finite number"),
        ("optimizer.clip", "true", "is not a finite number"),
        ("optimizer.clip", True, "is not a finite number"),
        ("seed", "True", "config.seed='True' is not a whole number"),
        ("model.tie_embeddings", "yes", "is not true or false"),
        ("model.tie_embeddings", 1, "is not true or false"),
        ("data.path", None, "is not text"),
        ("init.group_gammas", "none", "is not a finite number"),
        ("optimizer.learnign_rate", "1", "no 'optimizer.learnign_rate'; did you mean optimizer.learning_rate?"),
        ("learning_rate", "1", "did you mean optimizer.learning_rate?"),
        ("optimiser.clip", "1", "did you mean optimizer.clip?"),
        ("optimizer", "1", "config.optimizer is a group of values; set one of optimizer.b1"),
        ("model.n_layers", "2.5", "config.model.n_layers='2.5' is not a whole number"),
        ("model.n_layers", True, "is not a whole number"),
        ("model.n_layers", 2.0, "is not a whole number"),
        ("init.gamma", "big", "config.init.gamma='big' is not a finite number"),
        ("init.gamma", math.nan, "is not a finite number"),
        ("init.group_gammas", "(1, 'x', 1, 1)", "is not a finite number"),
        ("init.group_gammas", "(1, 1", "is not a list"),
        ("model.gate", 3, "is not text"),
    ],
)
def test_overrides_refuse(name, value, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        load_config("lm:size=tiny", [(name, value)])


OWN = """
from ml_collections import ConfigDict
def get_config(arg=""):
    return ConfigDict({"arg": arg, "where": __file__})
"""


def test_a_spec_resolves_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the repository is not the working folder here
    ours = [load_config(spec) for spec in ("lm:size=tiny", "lm.py:size=tiny", "configs/lm:size=tiny", "configs/lm.py:size=tiny")]
    assert all(c == ours[0] for c in ours)

    (tmp_path / "sub").mkdir()
    mine = tmp_path / "sub" / "mine.py"
    mine.write_text(OWN)
    for spec in ("sub/mine", "sub/mine.py", str(mine)):
        assert load_config(f"{spec}:a=b:c").to_dict() == {"arg": "a=b:c", "where": str(mine)}

    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "lm.py").write_text(OWN)  # a path that exists from here is what is meant
    assert load_config("configs/lm.py:x").arg == "x"
    assert "model" in load_config("lm:size=tiny")


def test_the_example_of_the_documentation(tmp_path):
    code = re.search(r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs/config.md").read_text("utf-8"), re.DOTALL)
    (tmp_path / "mine.py").write_text(code[1])
    config = validate(load_config(f"{tmp_path / 'mine.py'}:layers=3,gamma=0.5"))
    assert (config.model.n_layers, config.init.gamma) == (3, 0.5)


def test_faults_of_a_config_file(tmp_path):
    def fault(text):
        file = tmp_path / "bad.py"
        file.write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_config(str(file))
        assert str(caught.value).startswith(str(file))
        return str(caught.value).removeprefix(str(file))

    assert fault("x = 1\ndef get_config(arg=''):\n    return {}['no']\n") == ", line 3: KeyError: 'no'"
    assert fault("\n\nimport no_such_module_anywhere\n").startswith(", line 3: ModuleNotFoundError")
    assert fault("x = 1\ny = = 2\n").startswith(", line 2: SyntaxError")
    assert fault("import json\ndef get_config(arg=''):\n    return json.loads('{')\n").startswith(", line 3: JSONDecodeError")
    assert "defines no get_config(arg)" in fault("x = 1\n")
    assert "must return an ml_collections.ConfigDict" in fault("def get_config(arg=''):\n    return {}\n")


def test_a_grid_is_no_config_and_says_so():
    with pytest.raises(ConfigError, match="get_config.*it describes a grid: gammalm grid takes it"):
        load_config("grids/quickstart")
    with pytest.raises(ConfigError, match="get_grid.*it describes one run: gammalm train takes it"):
        call("lm", "get_grid")


@pytest.mark.parametrize("spec", ["lmm", "configs/lmm.py:size=tiny", "/no/such/place.py", "", "."])
def test_a_missing_config_names_the_known_ones(spec):
    with pytest.raises(ConfigError, match="no config .* one of .*lm"):
        load_config(spec)


def config_names():
    return [name for name in available() if not name.startswith("grids/") and name != "mlp"]


@pytest.mark.parametrize("name", config_names())
def test_every_config_is_valid_in_every_size(name, tmp_path):
    module = load_module(name)
    for size in module.SIZES:
        for gate in ("none", "headwise", "elementwise"):
            for attention in ("mha", "mla"):
                config = validate(load_config(f"{name}:size={size},gate={gate},attention={attention}"))
                assert config.model.gate == gate and config.model.attention == attention and config.is_locked
                kinds = [rules for (leaf, kind), rules in KINDS.items() if leaves(config)[leaf] == kind]
                assert set(leaves(config)) == set(RULES).union(*kinds)  # no value goes unchecked
    to_json(config, tmp_path / "config.json")
    again = from_json(tmp_path / "config.json")
    assert again == config and again.is_locked
    assert {n: type(v) for n, v in leaves(again).items()} == {n: type(v) for n, v in leaves(config).items()}
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_nets_have_leaves_and_rules_of_their_own(tmp_path):
    module = load_module("mlp")
    for data in module.WIDTHS:
        for optimizer in module.RATES:
            config = validate(load_config(f"mlp:data={data},optimizer={optimizer},std=0.1"))
            assert set(leaves(config)) == set(NET_RULES) and config.is_locked
    to_json(config, tmp_path / "config.json")
    assert from_json(tmp_path / "config.json") == config, "leaves of decoders came in"
    told = {
        "model.widths": ((11, 16, 10), "must begin and end with"), "init.preset": ("mup", "one of fan_in"), "data.name": ("iris", "one of"),
        "optimizer.kind": ("muon", "one of sgd, adam"), "train.epochs": (0, "at least 1"),
    }  # fmt: skip
    for name, (value, message) in told.items():
        with pytest.raises(ConfigError, match=message):
            validate(load_config("mlp:data=wine-red", [(name, value)]))
    with config.unlocked():
        config.model.d_model = 4
    with pytest.raises(ConfigError, match="model.d_model: a net"):
        validate(config)
    for wrong in ("data=iris", "optimizer=muon"):
        with pytest.raises(ConfigError, match="is none of"):
            load_config(f"mlp:{wrong}")


@pytest.mark.parametrize("leaf, kind, needed", [("attention", "mla", "mla.kv_rank"), ("ffn", "moe", "moe.top_k"),
                                               ("ffn", "mlp", "activation"), ("positions", "learned", "max_positions")])
def test_a_kind_is_chosen_with_the_config(leaf, kind, needed):
    config = load_config("lm:size=tiny", [(f"model.{leaf}", kind)])
    with pytest.raises(ConfigError, match=rf"(?s)model.{leaf}='{kind}' needs .*model.{needed}.*not as an override"):
        validate(config)


@pytest.mark.parametrize(
    "spec, changes, told",
    [
        ("lm:size=tiny-moe", {"model.ffn": "dense"}, r"model.moe.n_experts.*nothing reads this under .*model.ffn='dense'"),
        ("lm:size=tiny,attention=mla", {"model.attention": "mha"}, "needs model.n_kv_heads"),
    ],
)
def test_leaves_that_nothing_reads_are_refused(spec, changes, told):
    with pytest.raises(ConfigError, match=told):
        validate(load_config(spec, list(changes.items())))


def test_a_saved_config_with_unknown_leaves_is_refused(tmp_path):
    config = load_config("lm:size=tiny").to_dict()
    config["mesh"]["exprt"] = 2
    config["modle"] = {"gate": "none"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="mesh.exprt, modle.gate: nothing reads this"):
        validate(load_config(str(tmp_path / "config.json")))
    (tmp_path / "checksums.json").write_text('{"a.b": 1}')
    with pytest.raises(ConfigError, match="is no saved config"):
        load_config(str(tmp_path / "checksums.json"))


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"top_k": 17}, "top_k=17 is more than model.moe.n_experts=16"),
        ({"first_k_dense": 2}, "first_k_dense=2 leaves none of model.n_layers=2"),
        ({"score": "tanh"}, "one of sigmoid, softmax"),
        ({"d_expert": 0, "bias_rate": -1.0}, "(?s)d_expert=0 must be.*bias_rate=-1.0 must be"),
    ],
)
def test_mixtures_that_cannot_be(changes, told):
    with pytest.raises(ConfigError, match=told):
        validate(load_config("lm:size=tiny-moe", [(f"model.moe.{name}", value) for name, value in changes.items()]))


@pytest.mark.parametrize("name", [name for name in available() if name.startswith("grids/")])
def test_every_grid_has_valid_cells(name):
    cells = call(name, "get_grid").cells
    assert len(cells) > 1
    for cell in cells:
        assert cell.config().is_locked


@pytest.mark.parametrize("text", ["{", "[1]", "3"])
def test_a_damaged_saved_config(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="config.json"):
        from_json(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="missing.json"):
        from_json(tmp_path / "missing.json")


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"init.gamma": -1.0}, "init.gamma=-1.0 must be a finite number of at least 0"),
        ({"init.gamma": "text"}, "init.gamma='text' must be"),
        ({"init.gamma": math.inf}, "init.gamma=inf must be"),
        ({"init.group_gammas": (1.0, 1.0)}, "init.group_gammas=(1.0, 1.0) must be four"),
        ({"model.norm_eps": 0.0}, "model.norm_eps=0.0 must be"),
        ({"model.gate": "soft"}, "one of none, headwise, elementwise"),
        ({"data.packing": "tight"}, "one of concat, documents"),
        ({"model.dtype": "fp32"}, "one of bfloat16, float32"),
        ({"model.remat": True}, "one of none, dots, full"),
        ({"optimizer.schedule": "linear"}, "one of cosine, wsd, constant"),
        ({"optimizer.warmup_steps": 11, "train.steps": 10}, "optimizer.warmup_steps=11 is longer than the run (train.steps=10)"),
        ({"optimizer.warmup_steps": 9, "train.steps": 10, "optimizer.schedule": "wsd"}, "overlap"),
        ({"batch.sequences": 6, "batch.micro_batches": 4}, "batch.sequences=6 is no multiple of batch.micro_batches=4"),
        ({"model.n_heads": 6, "model.n_kv_heads": 4}, "model.n_heads=6 is no multiple of model.n_kv_heads=4"),
        ({"data.seq_len": 130, "mesh.context": 4}, "data.seq_len=130 is no multiple of mesh.context=4"),
        ({"model.head_dim": 33}, "model.head_dim=33 must be an even"),
        ({"model.n_layers": 0}, "model.n_layers=0 must be"),
        ({"model.n_layers": True}, "model.n_layers=True must be"),
        ({"optimizer.clip": -1.0}, "optimizer.clip=-1.0 must be"),
        ({"optimizer.final_fraction": 1.5}, "optimizer.final_fraction=1.5 must be"),
        ({"mesh.data": 0}, "mesh.data=0 must be"),
        ({"mesh.data": -1, "mesh.fsdp": -1}, "only one axis may be -1"),
        ({"seed": -1}, "seed=-1 must be"),
    ],
)
def test_validate_refuses(changes, says):
    config = load_config("lm:size=tiny").unlock()
    validate(config)
    for name, value in changes.items():
        group, _, leaf = name.rpartition(".")
        node = config[group] if group else config
        with node.ignore_type():
            node[leaf] = value
    with pytest.raises(ConfigError, match=re.escape(says)):
        validate(config)


def test_validate_reports_every_breach_and_what_is_missing():
    config = to_dict(load_config("lm:size=tiny"))
    del config["optimizer"]["clip"], config["mesh"]
    config["seed"] = 0.5
    with pytest.raises(ConfigError) as caught:
        validate(ConfigDict(config))
    for says in ("optimizer.clip is missing", "mesh.fsdp is missing", "seed=0.5"):
        assert says in str(caught.value)
