"""Number formats, activation checkpointing that computes the same, and micro-batches whose
gradients a step adds up.
"""

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from autotune.config.compose import Composer
from autotune.config.schema import PrecisionConfig, TrialConfig
from autotune.errors import ConfigError, InvalidTrialError
from autotune.space import Suggestion
from autotune.training.runtime import Precision, checkpoint_activations

MakeConfig = Callable[..., TrialConfig]
CPU = torch.device("cpu")
OF_TORCHAO = ["ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"]


class Counting(torch.nn.Module):
    """A layer that counts its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.passes = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return torch.tanh(self.norm(self.linear(inputs)))


def saved_elements(model: torch.nn.Module, inputs: torch.Tensor) -> int:
    """Numbers that autograd keeps between forward and backward pass."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(inputs).square().mean()
    return sum(kept.values())


def test_checkpointed_blocks_run_twice_keep_less_and_give_the_same_gradients_and_statistics() -> (
    None
):
    torch.manual_seed(0)
    plain = torch.nn.Sequential(*(Counting() for _ in range(3)))
    checkpointed = copy.deepcopy(plain)
    checkpoint_activations(checkpointed, recompute_statistics=False)
    inputs = torch.randn(32, 6)
    for model in (plain, checkpointed):
        model(inputs).square().mean().backward()
    assert [block.passes for block in plain] == [1, 1, 1]
    assert [block.passes for block in checkpointed] == [2, 2, 2]
    for mine, other in zip(checkpointed.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)
    assert checkpointed.state_dict().keys() == plain.state_dict().keys()
    for name, buffer in checkpointed.named_buffers():
        assert torch.equal(buffer, plain.get_buffer(name)), name
    assert saved_elements(checkpointed, inputs) < 0.6 * saved_elements(plain, inputs)


def test_a_model_says_itself_which_blocks_are_checkpointed() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Counting(), Counting()

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(inputs))

        def blocks(self) -> list[torch.nn.Module]:
            return [self.second]

    model = Model()
    checkpoint_activations(model, recompute_statistics=False)
    model(torch.randn(8, 6)).sum().backward()
    assert (model.first.passes, model.second.passes) == (1, 2)


def test_a_setting_of_one_training_is_not_left_to_the_next(trial_config: MakeConfig) -> None:
    from autotune.training.loop import train

    torch.backends.cudnn.benchmark = True
    next(train(trial_config("precision=tf32")))
    assert torch.get_float32_matmul_precision() == "high"
    next(train(trial_config()))
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.cudnn.benchmark is False


GRAPHS = "runtime.compile=reduce-overhead"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            (GRAPHS, "runtime.micro_batch_size=32"),
            (
                "runtime.micro_batch_size: found 32 of batch_size=64; with"
                " compile=reduce-overhead it must be null"
            ),
        ),
        (
            ("runtime.cuda_graph=true", "runtime.activation_checkpointing=true"),
            ("runtime.activation_checkpointing: found true, which reads the random state"),
        ),
    ],
)
def test_what_a_graph_cannot_replay_is_refused_in_one_line(
    overrides: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        _ = Composer(["experiment=cnn", "batch_size=64", *overrides]).compose().trial
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)


def test_a_point_of_a_space_that_a_graph_cannot_replay_is_left_out_alone() -> None:
    composer = Composer(["experiment=cnn", GRAPHS, "batch_size=64"])
    composer.compose_suggestion(Suggestion({"runtime.micro_batch_size": 64}), seed=0)
    with pytest.raises(
        InvalidTrialError, match=r"runtime\.micro_batch_size: found 16 of batch_size=64"
    ):
        composer.compose_suggestion(Suggestion({"runtime.micro_batch_size": 16}), seed=0)


def precision(**settings: Any) -> Precision:
    plain = {
        "autocast_dtype": None,
        "weights_dtype": "float32",
        "float32_precision": "ieee",
        "float8": False,
    }
    return Precision(PrecisionConfig(**{**plain, **settings}), CPU)


def test_autocast_multiplies_in_its_format_and_leaves_the_weights() -> None:
    here = precision(autocast_dtype="bfloat16")
    model = here.convert(torch.nn.Linear(4, 3))
    with here.autocast():
        outputs = model(torch.ones(2, 4))
    assert (outputs.dtype, model.weight.dtype) == (torch.bfloat16, torch.float32)
    assert here.make_scaler() is None
    assert precision(autocast_dtype="float16").make_scaler() is not None


def test_half_weights_compute_in_half_and_hand_float32_to_the_loss() -> None:
    here = precision(weights_dtype="bfloat16")
    model = here.convert(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)))
    outputs = model(torch.ones(2, 4, dtype=torch.bfloat16))
    assert {each.dtype for each in model.state_dict().values() if each.is_floating_point()} == {
        torch.bfloat16
    }
    assert (outputs.dtype, here.outputs(outputs).dtype) == (torch.bfloat16, torch.float32)


def test_float8_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(
        ConfigError, match=r"precision.float8: needs torchao .*: pip install 'autotune\[fp8\]'"
    ):
        precision(float8=True).convert(torch.nn.Linear(16, 16))


@pytest.mark.slow
@pytest.mark.filterwarnings(*OF_TORCHAO)
def test_float8_rounds_the_products_of_layers_that_fit_and_of_no_others() -> None:
    pytest.importorskip("torchao", reason="float8 needs torchao, an optional extra")
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 10))
    inputs = torch.randn(13, 64)  # rows are padded to a multiple of 16
    wanted = [plain[0](inputs), plain(inputs)]
    converted = precision(float8=True).convert(plain)
    error = (converted[0](inputs) - wanted[0]).abs().mean() / wanted[0].abs().mean()
    assert 0.005 < error < 0.06, (
        "three bits of mantissa round by up to 1/16, one layer's sum by less"
    )
    assert type(converted[1]) is torch.nn.Linear
    converted(inputs).square().mean().backward()
    assert converted[0].weight.grad.isfinite().all()
