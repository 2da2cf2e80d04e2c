"""`gammalm completion`: what a real bash offers, and that the scripts know every command and option (zsh and fish where they are)."""

import shutil
import subprocess

import pytest

from gammalm.cli import completion
from gammalm.cli.main import COMMANDS
from gammalm.config import leaves, load_config

BASH = shutil.which("bash")


@pytest.fixture(scope="module")
def commands():
    return list(completion.read_commands())


def test_every_command_and_option_is_known(commands):
    by_path = {command.path: command for command in commands}
    assert set(COMMANDS) == set(by_path[""].words) and set(COMMANDS) <= set(by_path)
    assert {"data prepare", "analyze sink", "export hf", "import hf"} <= set(by_path)
    train = {option.flag: option for option in by_path["train"].options}
    assert {"--config", "--workdir", "--print-config", "--help"} <= set(train)
    assert {f"--config.{name}" for name in leaves(load_config("lm"))} <= set(train)
    assert train["--config.model.gate"].values == ("none", "headwise", "elementwise")
    assert train["--config.model.tie_embeddings"].values == ("true", "false") and train["--config.seed"].values == ()
    assert {"lm", "grids/quickstart", "lm:size=tiny"} <= set(train["--config"].values)
    assert not train["--json"].takes and train["--workdir"].takes
    assert not any(option.flag.startswith("--config.") for option in by_path["report"].options)


# What is typed up to the cursor -> (the whole words that are offered, the part of the line that they stand for).
OFFERED = {
    "gammalm tra": ["train"],
    "gammalm export h": ["hf"],
    "gammalm analyze si": ["sink"],
    "gammalm data inspect --ver": ["--verify"],
    "gammalm inspect --ver": [],
    "gammalm train --prin": ["--print-config"],
    "gammalm train --config lm:size=nano-": ["nano-192", "nano-384", "nano-96"],
    "gammalm train --config=grids/quick": ["grids/quickstart"],
    "gammalm train --config lm --config.optimizer.learning_r": ["--config.optimizer.learning_rate="],
    "gammalm train --config lm --config.model.gate=h": ["headwise"],
    "gammalm train --config lm --config.model.gate h": ["headwise"],
    "gammalm grid --workdir train --config.train.tr": ["--config.train.tracker="],
    "gammalm train --config.model.gate=none --worl": [],
    "gammalm train --config.model.gate=none --wor": ["--workdir"],
    "gammalm export hf --dtype fl": ["float32"],
    "gammalm completion ": ["--help", "bash", "fish", "zsh"],
    "gammalm report --config.se": [],
}


def offered(shell, script, breaks, tmp_path):
    """Line -> what the function leaves in COMPREPLY, of a real shell."""
    (tmp_path / "script").write_text(script)
    asks = [f". {tmp_path / 'script'}", f"COMP_WORDBREAKS={breaks}"]
    for line in OFFERED:
        asks += [f"COMP_LINE='{line}' COMP_POINT={len(line)}", "_gammalm", 'echo "${COMPREPLY[*]}"']
    done = subprocess.run([shell, "--norc", "-c", "\n".join(asks)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return dict(zip(OFFERED, (sorted(line.split()) for line in done.stdout.split("\n")), strict=False))


def test_a_real_bash_offers_what_fits(commands, tmp_path):
    found = offered(BASH, completion.bash(commands), r"$' \t\n\"\'><=;|&(:'", tmp_path)
    assert found == OFFERED


def test_where_words_do_not_break_whole_words_are_offered(commands, tmp_path):
    found = offered(BASH, completion.bash(commands), r"$' \t\n'", tmp_path)
    assert found["gammalm train --config lm:size=nano-"] == ["lm:size=nano-192", "lm:size=nano-384", "lm:size=nano-96"]
    assert found["gammalm train --config=grids/quick"] == ["--config=grids/quickstart"]
    assert found["gammalm train --config lm --config.model.gate=h"] == ["--config.model.gate=headwise"]
    assert found["gammalm export hf --dtype fl"] == ["float32"]


def test_zsh_and_fish_take_their_scripts(commands, tmp_path):
    """Where they are installed: they parse; fish completes too. Elsewhere: the text alone."""
    assert "--config.optimizer.clip=" in completion.bash(commands) and "--config.optimizer.clip=" not in completion.zsh(commands)
    for shell, script in (("zsh", completion.zsh(commands)), ("fish", completion.fish(commands))):
        assert script.count("print-config") >= 1 and script.count("config.model.gate") >= 1
        (tmp_path / shell).write_text(script)
        if program := shutil.which(shell):
            subprocess.run([program, "-n", tmp_path / shell], check=True)
    if program := shutil.which("fish"):
        for line, words in {"gammalm tra": {"train"}, "gammalm data inspect --ver": {"--verify"}, "gammalm inspect --ver": set()}.items():
            ask = f"source {tmp_path / 'fish'}; complete -C '{line}'"
            done = subprocess.run([program, "--no-config", "-c", ask], capture_output=True, text=True, check=True)
            assert {word.split("\t")[0] for word in done.stdout.splitlines()} == words
