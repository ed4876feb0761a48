"""Lists of overrides: taken apart at their own commas, and refused in one line that names the
list.
"""

import pytest

from autotune.config.overrides import read_override_list
from autotune.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("[]", ()),
        ("[ ]", ()),
        ("[device=cpu]", ("device=cpu",)),
        ("[device=cpu, batch_size=64]", ("device=cpu", "batch_size=64")),
        ("[model.widths=[16,32],optimizer=adamw]", ("model.widths=[16,32]", "optimizer=adamw")),
        (
            "[model={_target_: my.Net, widths: [1, 2]},seed=1]",
            ("model={_target_: my.Net, widths: [1, 2]}", "seed=1"),
        ),
        (
            "['model.widths=[16,32]',\"optimizer=adamw\"]",
            ("model.widths=[16,32]", "optimizer=adamw"),
        ),
        ("[data.root='a, b]',x=\"c,d\"]", ("data.root='a, b]'", 'x="c,d"')),
        (r"['data.root=\'a, b\'']", ("data.root='a, b'",)),
        (r"[data.root=a\,b]", (r"data.root=a\,b",)),
        ("[x='a',y='b']", ("x='a'", "y='b'")),
        ("[+model.depth=3,lr=choice(1,2)]", ("+model.depth=3", "lr=choice(1,2)")),
    ],
)
def test_a_list_is_taken_apart_at_its_own_commas(text: str, overrides: tuple[str, ...]) -> None:
    assert read_override_list(text, "a") == overrides


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "device=cpu",
            "b: found 'device=cpu'; write a list of overrides, b=[device=cpu,",
        ),
        ("[device=cpu", "b: found '[device=cpu'; write a list"),
        ("[lr=0.1,0.2]", "b: found '0.2' in it"),
        ("[lr=0.1,]", "b: found '' in it"),
        ("[~model]", "b: found '~model' in it"),
        ("[x=[1]", "b: found 'x=[1' in it"),
        ("[x=1]]", "b: found 'x=1]' in it"),
        ("[x=a=b]", "b: found 'x=a=b' in it"),
    ],
)
def test_what_is_no_list_of_overrides_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_override_list(text, "b")
    assert str(refused.value).startswith(said)
