"""Our models behind lm-evaluation-harness: its LM class over a `Scorer`, registered as "gammalm", and one evaluation from tasks to results.

The harness (PyPI lm-eval, the extra `eval`) is imported here and nowhere else; importing this module raises ConfigError where it is not
installed. It makes the same requests on every process as on one alone (rank 0 of 1); the processes answer them together.
"""

import collections
import contextlib
import difflib
import inspect
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gammalm.errors import ConfigError, DataError, GammalmError
from gammalm.evaluation.batching import Request
from gammalm.evaluation.generate import CHUNK, Generator, Prompt
from gammalm.evaluation.results import leaves_of, rows_of
from gammalm.evaluation.sampling import Sampling
from gammalm.evaluation.scoring import Counts, Score, Scorer
from gammalm.progress import Progress

try:
    import lm_eval
    import lm_eval.models  # first its own models: a registry that holds ours alone would never load them
    from lm_eval.api.model import TemplateLM, hash_args
    from lm_eval.api.registry import model_registry
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, handle_non_serializable, make_disjoint_window
    from sqlitedict import SqliteDict
except ImportError as error:
    raise ConfigError(f"lm-evaluation-harness cannot be imported ({error}). Install it: pip install 'gammalm[eval]'.") from error

NAME = "gammalm"  # of our models, as in `--model gammalm`
MAX_NEW_TOKENS = 256  # where a task does not say, as with the harness's own models
CUT = "cut"  # beside answers of other kinds, which requests were cut is kept under this name
MATCHES = 3  # nearest names offered for a task that there is not


class GammaLM(TemplateLM):
    """One trained model as the harness sees it. `about`: facts that go into its results; `quiet`: no progress.

    `moved` is called as often as something is answered, on every process alike.
    """

    opener: Callable[..., "GammaLM"]  # keyword arguments of the harness's --model_args -> a model; see `register`

    def __init__(self, scorer: Scorer, generator: Generator, about: dict[str, Any] | None = None, *, quiet: bool = False):
        super().__init__()
        self.scorer, self.generator, self.about, self.quiet = scorer, generator, about or {}, quiet
        self.tokenizer = generator.tokenizer
        self.moved: Callable[[], None] = lambda: None
        self.written = self.prompts_cut = self.prompt_tokens_cut = 0
        self.cut: set[str] = set()  # which requests lost the beginning of their context: `hash_args` of CUT and theirs

    def load(self, params: dict, buffers: dict) -> None:
        """Answers with other weights of the same model from now on, placed alike; what was asked counts from 0 again."""
        self.scorer.load(params, buffers)
        self.generator.load(params, buffers)
        self.scorer.counts, self.cut = Counts(), set()
        self.written = self.prompts_cut = self.prompt_tokens_cut = 0

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict, additional_config: dict | None = None) -> "GammaLM":
        """Called by the harness with its --model_args, --batch_size, --max_batch_size and --device.

        JAX chooses the device; batches are bounded by tokens unless --batch_size is a number above 1, the harness's default.
        """
        size = str((additional_config or {}).get("batch_size", 1))
        given = ({"rows": int(size)} if size.isdigit() and int(size) > 1 else {}) | arg_dict
        try:
            inspect.signature(cls.opener).bind(**given)
        except TypeError as error:
            known = ", ".join(inspect.signature(cls.opener).parameters)
            raise ConfigError(f"--model_args: {error}. This model takes {known}.") from error
        return cls.opener(**given)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict | None = None) -> "GammaLM":
        return cls.create_from_arg_obj(lm_eval.utils.simple_parse_args_string(arg_string), additional_config)

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eod_id

    @property
    def max_length(self) -> int:
        return self.scorer.max_length

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.sha256

    def get_model_info(self) -> dict:
        return self.about

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        """Token ids of a text; our tokenizer adds none of its own."""
        return self.tokenizer.encode(string)

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        raise ConfigError("This model was trained on plain text and has no chat template. Leave --apply_chat_template out.")

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """As the harness cuts a text into context and continuation, and for what it cannot cut: a context of blanks alone, which go to the
        continuation, and a continuation that melts into the last token of its context."""
        before, after = super()._encode_pair(context, continuation)
        if not after:
            before, after = self.tok_encode(context), self.tok_encode(continuation)
        return before or [self.prefix_token_id], after

    def loglikelihood(self, requests, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        for request in requests:
            if not request.args[1]:
                raise DataError(f"{request.task_name}, item {request.doc_id}: an empty continuation has no likelihood. Leave the item out.")
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm or self.quiet)

    def _loglikelihood_tokens(self, requests, **_) -> list[tuple[float, bool]]:
        """(log-probability in nats, whether greedy) of ((context, continuation), their token ids)."""
        for texts, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise DataError(
                    f"A continuation of {len(continuation):,} tokens, {texts[1][:60]!r}…, is longer than the {self.max_length:,} that the "
                    "model reads at once: leave its item out, or the task."
                )
            self._note_cut(texts, len(context) + len(continuation) - 1 - self.max_length)
        found: list = [None] * len(requests)
        for score in self._scores([Request(context, continuation) for _, context, continuation in requests]):
            found[score.index] = score.logprob, score.greedy
            self.cache_hook.add_partial("loglikelihood", requests[score.index][0], found[score.index])
        return found

    def _scores(self, requests: list[Request]) -> Iterator[Score]:
        progress = Progress("loglikelihood", len(requests), "requests", quiet=self.quiet)
        for score in self.scorer.score(requests):
            yield score
            progress.advance(1)
            self.moved()
        progress.close()

    def _note_cut(self, args: tuple, tokens: int) -> None:
        """The request `args` loses so many tokens of its context, if more than 0; known with its answer when that is asked no more."""
        if tokens > 0:
            self.cut.add(hash_args(CUT, args))
            self.cache_hook.add_partial(CUT, args, tokens)

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each text in nats, in windows as long as the model reads, of which each token is in the one that gives it most
        context; the first token follows the end of a document."""
        windows, owner = [], []
        for number, request in enumerate(requests):
            cut = get_rolling_token_windows(self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, 1)
            mine = [Request(*make_disjoint_window(window)) for window in cut]
            windows += mine
            owner += [number] * len(mine)
        parts: list[list[float]] = [[] for _ in requests]
        left = collections.Counter(owner)
        for score in self._scores(windows):
            number = owner[score.index]
            parts[number].append(score.logprob)
            left[number] -= 1
            if not left[number]:
                self.cache_hook.add_partial("loglikelihood_rolling", requests[number].args, math.fsum(parts[number]))
        return [math.fsum(part) for part in parts]

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """What the model writes after each context, up to the first of the strings in "until" or the end of the document, without it.

        A context too long for the model beside the tokens asked for is cut from the left, and counted. Draws are numbered among themselves:
        the harness asks for all of them again when it goes on, and for greedy texts no more that it has.
        """
        drawn = itertools.count()
        prompts = [self._prompt(request, drawn) for request in requests]
        found: list = [None] * len(requests)
        progress = Progress("generate", len(requests), "requests", quiet=self.quiet)
        for piece in self.generator.stream(prompts, CHUNK):
            if piece.done:
                found[piece.index] = piece.done.text
                self.written += len(piece.done.tokens)
                self.prompts_cut += piece.done.cut > 0
                self.prompt_tokens_cut += piece.done.cut
                self._note_cut(requests[piece.index].args, piece.done.cut)
                self.cache_hook.add_partial("generate_until", requests[piece.index].args, piece.done.text)
                progress.advance(1)
            self.moved()
        progress.close()
        return found

    def _prompt(self, request, numbers: Iterator[int]) -> Prompt:
        context, asked = request.args
        how = normalize_gen_kwargs(asked, MAX_NEW_TOKENS)
        stops = [stop for stop in how.pop("until") if stop]
        most, drawn = how.pop("max_gen_toks"), how.pop("do_sample")
        given = {name: how.pop(name) for name in ("temperature", "top_k", "top_p", "seed") if name in how}
        if how.pop("num_beams", 1) != 1 or how:
            raise ConfigError(f"{request.task_name} asks for generation with {', '.join(how) or 'beams'}, which this model does not know.")
        sampling, index = (Sampling(**{"temperature": 1.0} | given), next(numbers)) if drawn else (Sampling(), None)
        return Prompt(self.tok_encode(context) or [self.prefix_token_id], most, stops, sampling=sampling, long="left", index=index)

    @property
    def requests(self) -> dict:
        """What the model was asked, not what was known before: `scoring.Counts`; in generation tokens written and contexts cut."""
        generation = {"written": self.written, "prompts_cut": self.prompts_cut, "prompt_tokens_cut": self.prompt_tokens_cut}
        return vars(self.scorer.counts) | generation


def register(opener: Callable[..., GammaLM]) -> None:
    """Makes `--model gammalm` of the harness open models with `opener`, whose keyword arguments are those of --model_args."""
    GammaLM.opener = staticmethod(opener)
    if NAME not in model_registry:
        model_registry.register(NAME, target=GammaLM)


@contextlib.contextmanager
def as_process(process: int) -> Iterator[None]:
    """During the block the harness names files of answers by this process, and process 0 alone gets results. LOCAL_RANK is what it goes by,
    where all have rank 0; other libraries take that for a cluster of torch, so it does not stay."""
    before = os.environ.pop("LOCAL_RANK", None)
    if process:
        os.environ["LOCAL_RANK"] = str(process)
    try:
        yield
    finally:
        os.environ.pop("LOCAL_RANK", None)
        if before is not None:
            os.environ["LOCAL_RANK"] = before


def command_line(arguments: Sequence[str]) -> None:
    """The harness's own command line, with our model in it if it was registered."""
    from lm_eval.__main__ import cli_evaluate

    before, sys.argv = sys.argv, ["gammalm lm-eval", *arguments]  # it looks nowhere else
    try:
        cli_evaluate()
    finally:
        sys.argv = before


class Tasks(TaskManager):
    """The harness's tasks, loaded once; that the items of one cannot be is a DataError. `hint`: what to do about it, for the message."""

    hint = "Look whether this machine reaches the network."

    def __init__(self, **how):
        super().__init__(**how)
        self._loaded: dict[tuple[str, ...], dict] = {}

    def load(self, task_list):
        key = tuple(map(str, task_list))
        try:
            if key not in self._loaded:
                self._loaded[key] = super().load(task_list)
            return self._loaded[key]
        except GammalmError:
            raise
        except Exception as error:  # whatever the libraries below raise
            said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise DataError(f"The items of {', '.join(map(str, task_list))} cannot be loaded ({said}). {self.hint}") from error


def named_tasks(manager: TaskManager, names: Sequence[str], asked_by: str = "--tasks") -> list[str]:
    """The tasks, groups and tags that `names` mean, separated by commas or not, * and ? for any letters; or files of tasks (.yaml).

    Raises ConfigError, which `asked_by` opens, for a name that matches nothing, with the nearest there are.
    """
    wanted = [name for text in names for name in text.split(",") if name]
    found: list[str] = []
    for name in wanted:
        matched = [name] if name.endswith(".yaml") and Path(name).is_file() else manager.match_tasks([name])
        if not matched:
            near = difflib.get_close_matches(name, manager.all_tasks, MATCHES)
            hint = f"Do you mean {' or '.join(near)}?" if near else "`gammalm lm-eval ls tasks` lists all."
            raise ConfigError(f"{asked_by}: there is no task {name!r}. {hint}")
        found += matched
    if not found:
        raise ConfigError(f"{asked_by} names no task. `gammalm lm-eval ls tasks` lists all.")
    return list(dict.fromkeys(found))


def refuse_unwritable(tasks: dict, max_length: int, mesh, generation: dict | None = None) -> None:
    """Raises ConfigError for loaded tasks that ask a model which reads `max_length` tokens over `mesh` to write what it cannot.

    `generation`: see `evaluate`.
    """
    for name, task in tasks.items():
        if task.get_config("output_type") != "generate_until":
            continue
        most = normalize_gen_kwargs({**(task.get_config("generation_kwargs") or {}), **(generation or {})}, MAX_NEW_TOKENS)["max_gen_toks"]
        if most >= max_length:
            raise ConfigError(
                f"{name} lets a model write {most:,} tokens, and this one reads {max_length:,} in all. Leave the task out, or let it write "
                "less: --max-new-tokens of `gammalm eval`, max_gen_toks in a YAML file of your own."
            )
        if mesh is not None and mesh.shape.get("context", 1) > 1:
            raise ConfigError(f"{name} lets a model write, for which the mesh's context must be 1. Leave it out, or change the mesh.")


def evaluate(
    lm: GammaLM, tasks: Sequence[str], *, manager: TaskManager, limit: float | None = None, num_fewshot: int | None = None,
    generation: dict | None = None, samples: bool = False, cache: Path | None = None, process: int = 0,
) -> tuple[dict, dict | None] | None:
    """One evaluation: {"rows", "requests", "harness"} for results.write_results, and the items of each task or None; None but on process 0.

    Rows are those of `rows_of`, with "cut": in how many items a context was too long for the model and lost its beginning. `limit`: items
    of each task, or below 1 the share of them. `num_fewshot`: None, as the task says. `generation`: what replaces a task's own, such as
    {"max_gen_toks": 64}. `cache`: folder where this `process` keeps the answers, by which an evaluation goes on. Raises DataError where
    items cannot be loaded, ConfigError as `refuse_unwritable`.
    """
    refuse_unwritable(manager.load(tasks)["tasks"], lm.max_length, lm.scorer.mesh, generation)
    answers = None if cache is None else str(cache / "responses")
    with as_process(process):
        results = lm_eval.simple_evaluate(
            model=lm, tasks=list(tasks), num_fewshot=num_fewshot, limit=limit, gen_kwargs=generation, log_samples=True,
            task_manager=manager, use_cache=answers,
        )  # fmt: skip
    if results is None:
        return None
    cut = set(lm.cut)
    if cache is not None:
        with SqliteDict(f"{answers}_rank{process}.db", flag="r") as kept:
            cut.update(kept)
    items = results.pop("samples")
    count = {task: sum(any(hash_args(CUT, args) in cut for args in item["arguments"]) for item in of) for task, of in items.items()}
    results, items = (json.loads(json.dumps(one, default=handle_non_serializable)) for one in (results, items if samples else None))
    results.pop("pretty_env_info", None)  # pages about the machine
    rows = [row | {"cut": sum(count[leaf] for leaf in leaves_of(results, row["task"]))} for row in rows_of(results)]
    return {"rows": rows, "requests": lm.requests, "harness": results}, items
