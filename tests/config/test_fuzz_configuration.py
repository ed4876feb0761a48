"""Whatever stands on a command line, in an experiment or in a search space runs or is one line,
within seconds; never a traceback.
"""

import contextlib
import io
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.config.command_line import EXIT_BAD_INPUT, run_command
from autotune.config.compose import Composer
from autotune.config.schema import Config
from autotune.config.space_files import check_space, read_search_space
from autotune.errors import ConfigError
from autotune.tune_study import tune_command
from tests.config.broken import FILES, LINES, SPACES
from tests.support.fuzz import examples

# of libraries, about values that no user would write
pytestmark = pytest.mark.filterwarnings("ignore")

_SMALL = (
    "search_space=[{batch_size:[32,64]}]",
    "device=cpu",
    "model.widths=[4]",
    "experiment=cnn_smoke",
)
_DRY = ("dry_run=true", "cluster.address=null", "data.download=false")
_MAX_CPU_SECONDS = 10.0
"""Processor time that no input may take longer than to read or to refuse."""
_REACHES_OUT = (
    "address",
    "download",
    "storage",
    "://",
    "install",
    "--help",
    "-h",
    "_dir",
    "dry_run",
)
"""Parts of arguments that would have a command look for machines, write for the shell, or run a
study."""


@pytest.fixture(scope="module", autouse=True)
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A working folder of its own, with a folder of configurations for --config-dir."""
    before = Path.cwd()
    folder = tmp_path_factory.mktemp("fuzzed")
    (folder / "conf" / "experiment").mkdir(parents=True)
    os.chdir(folder)
    yield
    os.chdir(before)


def tuned(*arguments: str) -> int | str | None:
    """Run ``autotune`` as a dry run in this process.

    Its exit code, after a check that a refusal is one line.
    """
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code: int | str | None = run_command(tune_command, arguments)
        except SystemExit as end:
            return end.code
    said = err.getvalue()
    assert code in (0, EXIT_BAD_INPUT), (arguments, said)
    if code == EXIT_BAD_INPUT:
        assert said.startswith("autotune: ")
        assert said.count("\n") == 1, (arguments, said)
        assert len(said) < 30_000
    return code


def refused_line(arguments: Sequence[str]) -> None:
    if not any(part in argument for part in _REACHES_OUT for argument in arguments):
        tuned(*_SMALL, *arguments, *_DRY)


@contextlib.contextmanager
def one_line() -> Iterator[None]:
    """Context in which a configuration may be refused, in one line."""
    refusal = ""
    try:
        yield
    except ConfigError as error:
        refusal = str(error)
    assert "\n" not in refusal


def compose(line: str) -> None:
    with one_line():
        _ = Composer([*_SMALL, line]).compose().trial


def read_experiment(content: str) -> None:
    Path("conf/experiment/mine.yaml").write_text(content, encoding="utf-8", errors="surrogatepass")
    with one_line():
        _ = Composer(["experiment=mine"], ["conf"]).compose().trial


def read_space(content: str, composer: Composer) -> None:
    Path("mine.yaml").write_text(content, encoding="utf-8", errors="surrogatepass")
    with one_line():
        check_space(read_search_space(["mine.yaml"], composer), composer)


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer(["experiment=cnn"])


def timed(check: Callable[[Any], None], example: Any) -> None:
    before = time.process_time()
    check(example)
    assert time.process_time() - before < _MAX_CPU_SECONDS, example


def all_of(corpus: Sequence[Any], check: Callable[[Any], None]) -> None:
    for broken in corpus:
        timed(check, broken)


_SOME = pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.slow)])
"""Takes each tenth of what is known to be broken, and all of it in the slow tier."""


@pytest.mark.slow
def test_broken_command_lines_are_one_line_each() -> None:
    all_of(LINES, lambda line: refused_line([line]))


@_SOME
def test_broken_command_lines_compose_or_are_one_line_each(every: int) -> None:
    all_of([line for line in LINES if not line.startswith("-")][::every], compose)


@_SOME
def test_broken_experiments_are_one_line_each(every: int) -> None:
    all_of(FILES[::every], read_experiment)


@_SOME
def test_broken_search_spaces_are_one_line_each(every: int, composer: Composer) -> None:
    all_of(SPACES[::every], lambda content: read_space(content, composer))


# Random ones.

_TERMS = (
    "sgd",
    "adamw",
    "mlp",
    "cnn",
    "cnn_smoke",
    "null",
    "true",
    "false",
    "a",
    "_self_",
    "_target_",
    "float",
    "int",
    "power_of_two",
    "choice",
    "log",
    "???",
    "torch.nn.Linear",
    "os.system",
    "${epochs}",
    "${oc.env:HOME}",
    "${model}",
    "../x",
    "/etc/passwd",
    "choice(1,2)",
    "interval(1,2)",
    "range(1,9)",
    "tag(log,interval(1,2))",
    "type",
    "low",
    "high",
    "step",
    "choices",
)
_NAMES = (
    *(key.name for key in fields(Config)),
    "optimizer.lr",
    "model.widths",
    "experiment",
    "defaults",
    "target.constraints",
    "search.sampler",
    "cluster.num_cpus",
    "model._target_",
    "search.sampler._target_",
    "hydra.run.dir",
    "hydra/launcher",
)
_LETTERS = st.characters(codec="utf-8", exclude_categories=["Cs"])
_WORDS = st.one_of(
    st.sampled_from(_TERMS),
    st.text(_LETTERS, max_size=6),
)
_NUMBERS = st.one_of(
    st.integers(-3, 300),
    st.floats(width=16),
    st.sampled_from(["1e-3", "1e999", ".nan", ".inf", "0x1F", "1_0", "007"]),
)
_KEYS = st.one_of(
    st.sampled_from(_NAMES),
    _WORDS,
)


def _listed(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.lists(inner, max_size=3).map(lambda items: f"[{','.join(items)}]"),
        st.lists(st.tuples(_WORDS, inner), max_size=3).map(
            lambda items: "{" + ",".join(f"{key}: {value}" for key, value in items) + "}"
        ),
        st.tuples(
            st.sampled_from(
                ["choice", "range", "interval", "tag", "int", "str", "glob", "sort", "extend_list"]
            ),
            st.lists(inner, max_size=3),
        ).map(lambda call: f"{call[0]}({','.join(call[1])})"),
    )


_TEXTS = st.recursive(st.one_of(_WORDS, _NUMBERS.map(str), _WORDS.map(repr)), _listed, max_leaves=6)
_OVERRIDES = st.tuples(
    st.sampled_from(["", "", "", "+", "++", "~"]),
    _KEYS,
    st.sampled_from(["=", "=", "=", "", "==", "@x="]),
    _TEXTS,
).map("".join)


@st.composite
def _damaged(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> str:
    """A text, of which now and then a part is gone, doubled or replaced."""
    text = draw(texts)
    if text and draw(st.booleans()):
        start = draw(st.integers(0, len(text) - 1))
        end = draw(st.integers(start, min(len(text), start + 10)))
        text = (
            text[:start]
            + draw(
                st.one_of(st.just(""), st.text(_LETTERS, max_size=4), st.just(text[start:end] * 2))
            )
            + text[end:]
        )
    return text


_ARGUMENTS = st.lists(
    st.one_of(_damaged(_OVERRIDES), st.sampled_from(LINES)), min_size=1, max_size=4
)
_NODES = st.one_of(
    _TEXTS,
    st.sampled_from(
        [
            "&a 1",
            "*a",
            "&a [*a]",
            "!!int x",
            "!!python/name:os",
            "|\n  x",
            ">-\n  x",
            "# x",
            "'",
            '"',
            "- a",
            "? a",
        ]
    ),
)
_FIELDS = st.one_of(
    st.tuples(_KEYS, st.just(": "), _NODES),
    st.tuples(_KEYS, st.just(":\n  - "), _NODES),
    st.tuples(_KEYS, st.just(":\n  "), _WORDS, st.just(": "), _NODES),
    st.tuples(st.just("defaults:\n  - "), _NODES),
    st.tuples(st.just("defaults:\n  - override /"), _KEYS, st.just(": "), _WORDS),
).map("".join)
_YAML = _damaged(st.lists(_FIELDS, max_size=5).map("\n".join))
_EXPERIMENTS = st.one_of(
    _YAML.map("# @package _global_\n".__add__),
    _YAML,
    _damaged(st.sampled_from(FILES)),
    st.text(_LETTERS, max_size=40),
)
_DOMAINS = st.one_of(
    _NODES,
    st.tuples(
        st.sampled_from(["float", "int", "power_of_two", "choice", "x"]),
        st.lists(
            st.tuples(
                st.sampled_from(["low", "high", "step", "log", "choices"]),
                st.one_of(_NUMBERS.map(str), _TEXTS),
            ),
            max_size=4,
        ),
    ).map(
        lambda domain: (
            f"{{type: {domain[0]}" + "".join(f", {key}: {value}" for key, value in domain[1]) + "}"
        )
    ),
)
_SPACES = st.one_of(
    _damaged(
        st.lists(st.tuples(_KEYS, st.just(": "), _DOMAINS).map("".join), max_size=4).map("\n".join)
    ),
    _damaged(st.sampled_from(SPACES)),
    st.text(_LETTERS, max_size=40),
)


def _tiers(fast: int, slow: int) -> Any:
    """Parametrisation of a test by ``num_examples``, one value for each tier."""
    return pytest.mark.parametrize(
        "num_examples", [fast, pytest.param(slow, marks=pytest.mark.slow)]
    )


def _fuzz(inputs: st.SearchStrategy[Any], check: Callable[[Any], None], num_examples: int) -> None:
    @examples(num_examples)
    @given(inputs)
    def run(example: Any) -> None:
        timed(check, example)

    run()


@_tiers(fast=10, slow=1000)
def test_random_command_lines_run_dry_or_are_one_line(num_examples: int) -> None:
    _fuzz(_ARGUMENTS, refused_line, num_examples)


@_tiers(fast=15, slow=600)
def test_random_experiments_compose_or_are_one_line(num_examples: int) -> None:
    _fuzz(_EXPERIMENTS, read_experiment, num_examples)


@_tiers(fast=30, slow=500)
def test_random_search_spaces_are_read_or_are_one_line(
    num_examples: int, composer: Composer
) -> None:
    _fuzz(_SPACES, lambda content: read_space(content, composer), num_examples)
