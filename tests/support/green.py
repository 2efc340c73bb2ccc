"""The part of cuda.bindings.driver that green contexts need, over a GPU that exists in numbers only."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar, Self


class Code(int):
    """A result as the binding has it: a number with a name."""

    name: str

    def __new__(cls, value: int, name: str) -> Self:
        made = super().__new__(cls, value)
        made.name = name
        return made


OK = Code(0, "CUDA_SUCCESS")
REFUSED = Code(911, "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION")


@dataclass(frozen=True)
class Resource:
    """Multiprocessors by number."""

    members: tuple[int, ...]

    @property
    def sm(self) -> SimpleNamespace:
        return SimpleNamespace(smCount=len(self.members))


@dataclass
class FakeGreenBinding:
    """One GPU.

    Args:
        total: multiprocessors.
        major: of the compute capability.
        refuses: calls that fail.
        grain: the driver cuts at its multiples only.
    """

    total: int = 132
    major: int = 9
    refuses: frozenset[str] = frozenset()
    grain: int = 8
    stack: list[tuple[int, ...]] = field(default_factory=list)
    """Contexts that were made current; the last one is. Each is its multiprocessors."""
    story: list[tuple[str, tuple[int, ...] | None]] = field(default_factory=list)
    """synchronize with what it waited for (None: everything), and created contexts."""

    CUdevice_attribute: ClassVar[Any] = SimpleNamespace(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=75)
    CUdevResourceType: ClassVar[Any] = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1)
    CUgreenCtxCreate_flags: ClassVar[Any] = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1)
    CUstream_flags: ClassVar[Any] = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cu") and name in object.__getattribute__(self, "refuses"):
            return lambda *_: (REFUSED,)
        return object.__getattribute__(self, name)

    @property
    def current(self) -> tuple[int, ...]:
        """Multiprocessors that a kernel launched now would have."""
        return self.stack[-1] if self.stack else tuple(range(self.total))

    def cuInit(self, flags: int) -> Any:  # noqa: N802 - the driver's names
        return (OK,)

    def cuDeviceGet(self, number: int) -> Any:  # noqa: N802
        return OK, number

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> Any:  # noqa: N802
        assert attribute == 75
        return OK, self.major

    def cuDeviceGetDevResource(self, device: int, kind: int) -> Any:  # noqa: N802
        assert kind == 1
        return OK, Resource(tuple(range(self.total)))

    def cuDevSmResourceSplitByCount(self, number: int, resource: Resource, flags: int, least: int) -> Any:  # noqa: N802
        assert (number, flags) == (1, 0)
        first = -(-least // self.grain) * self.grain
        return OK, [Resource(resource.members[:first])], 1, Resource(resource.members[first:])

    def cuDevResourceGenerateDesc(self, resources: list[Resource], number: int) -> Any:  # noqa: N802
        assert len(resources) == number == 1
        return OK, resources[0]

    def cuGreenCtxCreate(self, described: Resource, device: int, flags: int) -> Any:  # noqa: N802
        assert flags == 1
        self.story.append(("create", described.members))
        return OK, described

    def cuCtxFromGreenCtx(self, green: Resource) -> Any:  # noqa: N802
        return OK, green.members

    def cuGreenCtxStreamCreate(self, green: Resource, flags: int, priority: int) -> Any:  # noqa: N802
        assert (flags, priority) == (1, 0)
        return OK, 4096 + len(green.members)

    def cuCtxPushCurrent(self, context: tuple[int, ...]) -> Any:  # noqa: N802
        self.stack.append(context)
        return (OK,)

    def cuCtxPopCurrent(self) -> Any:  # noqa: N802
        return OK, self.stack.pop()

    def cuCtxSynchronize(self) -> Any:  # noqa: N802
        self.story.append(("synchronize", self.stack[-1] if self.stack else None))
        return (OK,)
