"""Files of the user's own: what their interpolations may stand for; what else they may not say is in execution/test_untrusted_files.py."""

import pytest

from autotune.config.user_files import check_interpolations, leaves_folder
from autotune.errors import ConfigError


def doubling(levels: int, form: str = "${model.a0}") -> dict[str, object]:
    """A mapping in which each value stands for two of the one before."""
    return {"model": {"a0": "x" * 10, **{f"a{i}": form.replace("a0", f"a{i - 1}") * 2 for i in range(1, levels)}}}


@pytest.mark.parametrize("form", ["${model.a0}", "${.a0}", "${model[a0]}"])
def test_texts_that_double_are_bounded(form: str) -> None:
    check_interpolations(doubling(10, form))
    with pytest.raises(ConfigError, match=r"^model\.a\d+: found interpolations that stand for more than 1,000,000 characters"):
        check_interpolations(doubling(40, form))


def test_lists_and_mappings_that_double_are_bounded() -> None:
    config = {"model": {"a0": {"b": [1, 2]}, **{f"a{i}": [f"${{model.a{i - 1}}}"] * 9 for i in range(1, 12)}}}
    with pytest.raises(ConfigError, match="stand for more than"):
        check_interpolations(config)


@pytest.mark.parametrize("step", [1, -1])
def test_interpolations_one_behind_the_other_are_bounded(step: int) -> None:
    chain = {f"a{i}": f"${{model.a{i + step}}}" for i in range(1, 3000)}
    check_interpolations({"model": dict(list(chain.items())[:5])})
    with pytest.raises(ConfigError, match=r"or go through more than 20 others; accepted are fewer$"):
        check_interpolations({"model": chain})


def test_what_stands_for_itself_or_for_nothing_is_left_to_hydra() -> None:
    check_interpolations({"a": "${a}", "b": "${c}", "c": ["${b}"], "d": "${nope.x}", "e": {"f": "${....x}", "g": "${.f}"}})


@pytest.mark.parametrize("name", ["..", "../x", "a/../../x", "/etc/x", "..\\x", "file://x"])
def test_names_that_lead_out_of_a_folder_are_known(name: str) -> None:
    assert leaves_folder(name)


@pytest.mark.parametrize("name", ["mlp", "my.net", "a/b", "a..b", "..."])
def test_other_names_do_not_lead_out(name: str) -> None:
    assert not leaves_folder(name)
