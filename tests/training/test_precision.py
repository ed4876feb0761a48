"""Number formats: what is converted, what is scaled, and that float8 rounds as float8 does."""

import sys
from typing import Any

import pytest
import torch

from autotune.config.compose import Composer
from autotune.config.schema import PrecisionConfig
from autotune.errors import ConfigError
from autotune.training.precision import Precision
from autotune.training.run import check_training

CPU = torch.device("cpu")
OPERATORS = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)
OF_TORCHAO = ["ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"]


def precision(**settings: Any) -> Precision:
    plain = {"autocast_dtype": None, "weights_dtype": "float32", "float32_precision": "ieee", "float8": False}
    return Precision(PrecisionConfig(**{**plain, **settings}), CPU)


@pytest.mark.parametrize(("dtype", "scales"), [(None, False), ("bfloat16", False), ("float16", True)])
def test_only_float16_scales_its_gradients(dtype: str | None, scales: bool) -> None:
    assert (precision(autocast_dtype=dtype).make_scaler() is not None) is scales


def test_autocast_multiplies_in_its_format_and_leaves_the_weights() -> None:
    here = precision(autocast_dtype="bfloat16")
    model = here.convert(torch.nn.Linear(4, 3))
    with here.autocast():
        outputs = model(torch.ones(2, 4))
    assert (outputs.dtype, model.weight.dtype) == (torch.bfloat16, torch.float32)


def test_half_weights_compute_in_half_and_hand_float32_to_the_loss() -> None:
    here = precision(weights_dtype="bfloat16")
    model = here.convert(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)))
    outputs = model(torch.ones(2, 4, dtype=torch.bfloat16))
    assert {each.dtype for each in model.state_dict().values() if each.is_floating_point()} == {torch.bfloat16}
    assert (outputs.dtype, here.outputs(outputs).dtype) == (torch.bfloat16, torch.float32)


def test_float8_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ConfigError, match=r"precision.float8: needs torchao .*; accepted after pip install 'autotune\[fp8\]'"):
        precision(float8=True).convert(torch.nn.Linear(16, 16))


@pytest.mark.slow
@pytest.mark.filterwarnings(*OF_TORCHAO)
def test_float8_rounds_the_products_of_layers_that_fit_and_of_no_others() -> None:
    pytest.importorskip("torchao", reason="float8 needs torchao, an optional extra")
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 10))
    inputs = torch.randn(16, 64)
    wanted = [plain[0](inputs), plain(inputs)]
    converted = precision(float8=True).convert(plain)
    error = (converted[0](inputs) - wanted[0]).abs().mean() / wanted[0].abs().mean()
    assert 0.005 < error < 0.06, "three bits of mantissa round by up to 1/16, one layer's sum by less"
    assert type(converted[1]) is torch.nn.Linear
    converted(inputs).square().mean().backward()
    assert converted[0].weight.grad.isfinite().all()


@pytest.mark.slow
@pytest.mark.filterwarnings(*OF_TORCHAO)
def test_float8_refuses_a_model_that_it_cannot_speed_up() -> None:
    pytest.importorskip("torchao", reason="float8 needs torchao, an optional extra")
    with pytest.raises(ConfigError, match="no linear layer whose sizes are multiples of 16"):
        precision(float8=True).convert(torch.nn.Sequential(torch.nn.Conv2d(1, 16, 3), torch.nn.Linear(10, 10)))


@pytest.mark.slow
@pytest.mark.filterwarnings(*OF_TORCHAO)
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ("experiment=mlp", "batch_size=24"),
            "batch_size: found 24, which gives a float8 layer 24 rows at once; accepted are multiples of 16 rows",
        ),
        (("experiment=mlp", "batch_size=64", "runtime.micro_batch_size=48"), None),
        (
            ("experiment=mlp", "batch_size=64", "runtime.micro_batch_size=24"),
            "runtime.micro_batch_size: found 24, which gives a float8 layer 24 ",
        ),
        (
            ("experiment=mlp", "batch_size=56", "runtime.micro_batch_size=48"),
            "runtime.micro_batch_size: found 48, which gives a float8 layer 8 ",
        ),
        (
            ("experiment=mlp", "batch_size=32", "parallelism=ddp", "parallelism.num_workers=4"),
            "batch_size: found 32, which gives a float8 layer 8 ",
        ),
        (("experiment=mlp", "batch_size=10000"), "batch_size: found 10000 (285 are there), which gives a float8 layer 285 rows"),
        (("experiment=transformer", "batch_size=5"), None),  # 128 tokens a sample
    ],
)
def test_batches_that_float8_cannot_multiply_are_refused_in_one_line(overrides: tuple[str, ...], said: str | None) -> None:
    pytest.importorskip("torchao", reason="float8 needs torchao, an optional extra")
    config = Composer([*overrides, "device=cpu", "precision=fp8"]).compose().trial
    if said is None:
        check_training(config)
        return
    with pytest.raises(ConfigError) as refused:
        check_training(config)
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)


class Failing(torch.nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError


def test_a_model_that_fails_while_float8_asks_for_its_rows_is_left_as_it_was() -> None:
    pytest.importorskip("torchao", reason="float8 needs torchao, an optional extra")
    model = precision(float8=True).convert(torch.nn.Sequential(torch.nn.Linear(16, 16), Failing()))
    with pytest.raises(ZeroDivisionError):
        precision(float8=True).float8_rows(model, torch.zeros(16, 16))
    assert all(module.training and not module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("before", ["none", "ieee", "tf32"])
@pytest.mark.parametrize("float32_precision", ["ieee", "tf32"])
def test_code_that_reads_whether_tf32_is_allowed_is_told(float32_precision: str, before: str) -> None:
    for each in (torch.backends, torch.backends.cudnn, *OPERATORS):
        each.fp32_precision = before  # as an earlier training's own code may have left it
    precision(float32_precision=float32_precision).apply()
    is_allowed = float32_precision == "tf32"
    assert torch.backends.cudnn.allow_tf32 is is_allowed
    assert torch.backends.cuda.matmul.allow_tf32 is is_allowed
    assert torch.get_float32_matmul_precision() == ("high" if is_allowed else "highest")
    assert [each.fp32_precision == "tf32" for each in OPERATORS] == [is_allowed] * 3
