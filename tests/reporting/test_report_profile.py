"""A profile is told in columns that add up."""

from io import StringIO

from rich.console import Console

from autotune.reporting.profile import print_profile
from autotune.step_profile import StepProfile
from tests.test_step_profile import CPU, GPU


def lines(profile: StepProfile, *advice: str) -> list[list[str]]:
    file = StringIO()
    console = Console(file=file, width=80, force_terminal=False)
    print_profile(
        console, profile, advice, title="cnn", files={"trace": "a/folder [of] mine/trace.json"}
    )
    return [line.split() for line in file.getvalue().splitlines()]


def test_a_step_is_told_by_parts_and_operators() -> None:
    said = lines(CPU, "[bold]much[/]: try precision=bf16")
    assert ["forward", "450.000", "45.0%"] in said
    assert ["Python", "between", "50.000", "5.0%"] in said
    assert ["step", "800", "ms,", "80", "samples/s", "(mean", "of", "20", "steps)"] in said
    assert ["aten::addmm", "1", "600.000", "60.0%"] in said
    assert ["advice", "[bold]much[/]:", "try", "precision=bf16"] in said
    assert ["trace", "a/folder", "[of]", "mine/trace.json"] in said
    assert ["advice", "none:", "nothing", "stands", "out"] in lines(CPU)


def test_a_gpu_has_columns_of_its_own() -> None:
    said = lines(GPU)
    assert ["backward", "100.000", "10.0%", "430.000", "43.0%"] in said
    assert ["waiting", "for", "the", "GPU", "700.000", "70.0%", "0.000", "0.0%"] in said
    assert ["idle", "0.000", "0.0%", "100.000", "10.0%"] in said
