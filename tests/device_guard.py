"""What would make the host wait for a device, found on a machine without one: tensors are told apart by their memory.

Within a guard, memory that is said to be the device's, what is computed from it and what is allocated may not be looked
at, and no copy of it may be taken but one that nobody waits for.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LOOKED_AT = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__"}
SIZED_BY_VALUES = {"nonzero", "masked_select", "unique", "_unique2", "equal", "is_nonzero", "_local_scalar_dense"}

INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""By a mask they are sized by its values."""


class Waits(AssertionError):
    """The host would wait for the device here."""


class DeviceGuard:
    """A context. `memory`: tensors of the device."""

    def __init__(self, memory: Iterable[torch.Tensor]) -> None:
        self._held = list(memory)  # memory that is given back would be given out again
        self._places = {self._place(tensor) for tensor in self._held}
        self._stack = ExitStack()

    @staticmethod
    def _place(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage().data_ptr()

    def is_device(self, tensor: object) -> bool:
        return isinstance(tensor, torch.Tensor) and self._place(tensor) in self._places

    def add(self, tensor: torch.Tensor) -> None:
        self._held.append(tensor)
        self._places.add(self._place(tensor))

    def __enter__(self) -> Self:
        self._stack.enter_context(_Looks(self))
        self._stack.enter_context(_Operators(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


class _Looks(TorchFunctionMode):
    def __init__(self, guard: DeviceGuard) -> None:
        super().__init__()
        self._guard = guard

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in LOOKED_AT and self._guard.is_device(args[0]):
            raise Waits(f"{func.__name__} of a tensor of the device")
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __init__(self, guard: DeviceGuard) -> None:
        super().__init__()
        self._guard = guard

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_device = [self._guard.is_device(tensor) for tensor in tensors]
        if name == "copy_":
            if on_device[0] != on_device[1] and not (len(args) > 2 and args[2]):
                raise Waits("a copy between host and device that is waited for")
        elif any(on_device):
            if name in SIZED_BY_VALUES or (name in INDEXED and any(t.dtype == torch.bool for t in tensors[1:])):
                raise Waits(f"{name} of a tensor of the device")
            if not all(on_device[i] or tensor.dim() == 0 for i, tensor in enumerate(tensors)):
                raise Waits(f"{name} of tensors of host and device")
        result = func(*args, **kwargs)
        if (any(on_device) or not tensors) and name != "copy_":
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self._guard.add(leaf)
        return result
