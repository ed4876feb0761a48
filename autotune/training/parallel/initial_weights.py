"""A model's initial weights, made one tensor at a time, so that ranks which divide a model never hold the whole of it.

A model is constructed on the meta device, where tensors have no memory, and each operation that made or changed a tensor is recorded.
Once the ranks have divided the model, every rank repeats the operations on the CPU in their order, keeps a tensor while an operation
still needs its values, and copies its own part. Random numbers are drawn as the constructor draws them, so the weights are those of a
single process, whatever the constructor does. One that depends on its tensors' values cannot be recorded; then the whole model is
constructed in host memory, but still never on a GPU.

Source: deferred initialisation in pytorch/torchdistx; here all operations are repeated in order, so that random numbers stay the same.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from autotune.training.checkpoint import random_state, set_random_state

_log = logging.getLogger(__name__)

_CPU, _META = torch.device("cpu"), torch.device("meta")
_OVERWRITES = {"bernoulli_", "copy_", "exponential_", "fill_", "normal_", "random_", "uniform_", "zero_"}
"""Operations that do not read the tensor that they write: its earlier values need not be kept until then."""
_MOVES_MEMORY = {"resize_", "set_"}
"""Operations that give a tensor other memory, which a recording does not follow."""


class InitialWeights:
    """The initial values of a model on the meta device."""

    def __init__(self, tensors: Mapping[str, Tensor], operations: "list[_Operation]") -> None:
        self._operations = operations
        self._values = {name: tensor.detach() for name, tensor in tensors.items() if not tensor.is_meta}
        self._names: dict[int, dict[str, _View]] = {}
        made = {memory for operation in operations for memory in operation.memories}
        for name, view in ((name, _view(tensor)) for name, tensor in tensors.items() if tensor.is_meta):
            if view.memory not in made:
                raise _UnrecordableError(f"{name} was made outside of the recording")
            self._names.setdefault(view.memory, {})[name] = view

    def load(
        self, model: nn.Module, device: torch.device, *, parameters_on: torch.device | None = None, elsewhere: Collection[Tensor] = ()
    ) -> None:
        """Give a model on the meta device memory, and this rank's part of the initial weights.

        Args:
            model: the model, with parameters that may have been replaced by distributed tensors.
            device: device of buffers, and of parameters unless ``parameters_on`` names another one.
            parameters_on: device of the parameters; None for ``device``.
            elsewhere: tensors that only other ranks hold, which stay on the meta device.
        """
        absent = {id(tensor) for tensor in elsewhere}

        def with_memory(tensor: Tensor) -> Tensor:
            if id(tensor) in absent:
                return tensor
            return torch.empty_like(tensor, device=(parameters_on or device) if isinstance(tensor, nn.Parameter) else device)

        _replace_tensors(model, with_memory)
        held = {name: tensor for name, tensor in _named_tensors(model).items() if not tensor.is_meta}
        with torch.no_grad():
            for name, whole in self._whole_tensors():
                if name in held:
                    _copy_part(held[name], whole)
                del whole

    def _whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and values of all tensors, each as soon as its value is final; a value is dropped before the next one is made."""
        yield from self._values.items()
        uses: dict[int, list[int]] = {}
        for index, operation in enumerate(self._operations):
            for memory in operation.memories:
                uses.setdefault(memory, []).append(index)
        held: dict[int, Tensor] = {}
        for operation in self._operations:
            operation.repeat(held)
            for memory in operation.memories:
                uses[memory].pop(0)
                following = self._operations[uses[memory][0]] if uses[memory] else None
                if following is None:
                    yield from ((name, view.of(held[memory])) for name, view in self._names.get(memory, {}).items())
                if following is None or following.overwrites == memory:
                    del held[memory]


def on_meta_device(construct: Callable[[], nn.Module]) -> tuple[nn.Module, InitialWeights]:
    """A model on the meta device, and its initial weights; random numbers are drawn when these are loaded.

    Raises:
        Exception: the constructor raised it.
    """
    before, recorder = random_state(_CPU), _Recorder()
    try:
        with recorder, _SeemsOnCPU():
            model = construct()
        recorder.check_random_state()
        recorder.check_constants()
        weights = InitialWeights(_named_tensors(model), recorder.operations)
    except Exception as error:  # noqa: BLE001  # of the recording or of the constructor itself, which then raises it again
        _log.info("the model is constructed whole in every worker's memory, since its constructor cannot be recorded: %s", error)
        set_random_state(before, _CPU)
        model = construct()
        weights = InitialWeights(_named_tensors(model), [])
    _replace_tensors(model, lambda tensor: tensor if tensor.is_meta else tensor.detach().to(_META))
    return model, weights


class _UnrecordableError(Exception):
    """A constructor does what a recording does not follow."""


@dataclass(frozen=True)
class _View:
    """A tensor of the recording: a view of the memory with that number."""

    memory: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def of(self, base: Tensor) -> Tensor:
        """The same view of a tensor that holds the memory's values."""
        return base.as_strided(self.size, self.stride, self.offset)


def _view(tensor: Tensor) -> _View:
    storage = tensor.untyped_storage()
    return _View(storage._cdata, tensor.size(), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)  # noqa: SLF001  # no public identity


@dataclass(frozen=True)
class _Operation:
    """A recorded call of an operator, with views in place of tensors on the meta device."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    settings: Mapping[str, Any]
    made: tuple[tuple[int, _View], ...]
    """Views of memory that the operation made, each with its place among all that it returns."""
    memories: tuple[int, ...]
    """All memory that the operation reads, writes or makes."""
    overwrites: int | None
    """Memory that the operation writes as a whole without reading it."""

    def repeat(self, held: dict[int, Tensor]) -> None:
        """Do the operation on the CPU, on the values of all memory that is held by number."""

        def real(argument: Any) -> Any:
            if not isinstance(argument, _View):
                return argument
            if argument.memory not in held:  # it is overwritten now
                held[argument.memory] = torch.empty_strided(argument.size, argument.stride, dtype=argument.dtype)
            return argument.of(held[argument.memory])

        with torch.no_grad():
            returned = tree_leaves(self.function(*tree_map(real, self.arguments), **tree_map(real, dict(self.settings))))
        for place, view in self.made:
            held[view.memory] = returned[place]


class _SeemsOnCPU(TorchFunctionMode):
    """Shows tensors of the meta device as what they stand for: torch's initialisers, for example, leave those of the meta device out."""

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if function == torch.Tensor.__setitem__ and isinstance(args[2], int | float):
            args = (*args[:2], torch.tensor(args[2]))  # torch would make it on the tensor's device, where it has no value
        result = function(*args, **(kwargs or {}))
        if function == torch.Tensor.is_meta.__get__:  # type: ignore[attr-defined]  # a descriptor, by torch's stubs a bool
            return False
        return _CPU if function == torch.Tensor.device.__get__ and result == _META else result


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Sends to the meta device what would be made on the CPU, and records it; operations on other devices are done as usual."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.operations: list[_Operation] = []
        self._memories: dict[int, tuple[torch.dtype, Any]] = {}  # keeps all recorded memory alive, so that each has a number of its own
        self._constants: list[tuple[Tensor, int]] = []
        self._random_state = torch.get_rng_state()

    def check_random_state(self) -> None:
        """Raise an error if random numbers were drawn or seeded: a recorded operation draws none until it is repeated."""
        if not torch.equal(torch.get_rng_state(), self._random_state):
            raise _UnrecordableError("it draws or seeds random numbers itself")

    def check_constants(self) -> None:
        """Raise an error if a tensor with values, which recorded operations read, was changed since."""
        if any(tensor._version != version for tensor, version in self._constants):  # noqa: SLF001  # no public one
            raise _UnrecordableError("it changes a tensor that it has used")

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        settings = dict(kwargs or {})
        inputs = [leaf for leaf in tree_leaves((args, settings)) if isinstance(leaf, Tensor)]
        parameters = {argument.name for argument in function._schema.arguments}  # noqa: SLF001  # no public one
        makes_on_cpu = "device" in parameters and torch.device(settings.get("device") or _CPU).type == "cpu" and not inputs
        if not makes_on_cpu and not any(tensor.is_meta for tensor in inputs):
            return function(*args, **settings)
        name = function._schema.name.rpartition("::")[2]  # noqa: SLF001
        if name in _MOVES_MEMORY or settings.get("generator") is not None:
            raise _UnrecordableError(f"{name} with {', '.join(settings) or 'no settings'}")
        moved = {"device": _META} if makes_on_cpu or settings.get("device") is not None else {}
        outputs = function(*args, **{**settings, **moved})
        returned = tree_leaves(outputs)
        known = {_view(tensor).memory for tensor in inputs}
        made = [(place, _view(tensor)) for place, tensor in enumerate(returned) if isinstance(tensor, Tensor) and tensor.is_meta]
        made = [(place, view) for place, view in made if view.memory not in known]
        for place, view in made:
            self._memories[view.memory] = (view.dtype, returned[place].untyped_storage())
        for view in (_view(tensor) for tensor in inputs if tensor.is_meta):
            if self._memories.get(view.memory, (None,))[0] != view.dtype:
                raise _UnrecordableError(f"{name} of memory that was made outside, or as another dtype")
        if made or function._schema.is_mutable:  # noqa: SLF001
            if moved:
                settings |= {"device": _CPU} | ({"dtype": returned[0].dtype} if "dtype" in parameters else {})
            self._record(function, name, args, settings, tuple(made))
        return outputs

    def _record(
        self, function: Any, name: str, args: tuple[Any, ...], settings: dict[str, Any], made: tuple[tuple[int, _View], ...]
    ) -> None:
        def viewed(argument: Any) -> Any:
            if not isinstance(argument, Tensor) or argument.is_meta:
                return _view(argument) if isinstance(argument, Tensor) else argument
            self._constants.append((argument, argument._version))  # noqa: SLF001
            return argument

        arguments, settings = tree_map(viewed, args), tree_map(viewed, settings)
        views = [leaf for leaf in tree_leaves((arguments, settings)) if isinstance(leaf, _View)] + [view for _, view in made]
        overwrites = None
        if name in _OVERWRITES and args[0].is_meta and sum(view.memory == views[0].memory for view in views) == 1:
            covered = args[0].numel() * args[0].element_size() == args[0].untyped_storage().nbytes()
            overwrites = views[0].memory if covered else None
        self.check_random_state()
        memories = tuple(dict.fromkeys(view.memory for view in views))
        self.operations.append(_Operation(function, arguments, settings, made, memories, overwrites))


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers of a model, a shared one under each of its names."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def _replace_tensors(model: nn.Module, replace: Callable[[Tensor], Tensor]) -> None:
    """Replace a model's parameters and buffers; modules that share a parameter go on sharing it, which ``Module.to_empty`` would undo."""
    replaced: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):  # noqa: SLF001  # as Module._apply
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in replaced:
                    new = replace(tensor)
                    is_parameter = isinstance(tensor, nn.Parameter) and new is not tensor
                    replaced[id(tensor)] = nn.Parameter(new, requires_grad=tensor.requires_grad) if is_parameter else new
                if tensor is not None:
                    tensors[name] = replaced[id(tensor)]  # type: ignore[assignment]  # parameters stay parameters


def _copy_part(target: Tensor, whole: Tensor) -> None:
    """Copy into a tensor of this rank its part of the whole value."""
    if isinstance(target, DTensor):
        sizes, starts = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
        whole = whole[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))]
        target = target.to_local()
    target.copy_(whole)
