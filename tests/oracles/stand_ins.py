"""Stand-ins for packages that the parsers import and never use without a GPU. Imported by the drivers beside it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
import typing
from unittest.mock import MagicMock


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Any module of the packages ``names``: decorators are identities, classes take anything, the rest are mocks."""

    class Module(types.ModuleType):
        def __getattr__(self, name: str) -> typing.Any:
            if name.startswith("__"):
                raise AttributeError(name)
            if name == "jit":
                return lambda function=None, **_: function if function is not None else (lambda f: f)
            if name in ("autotune", "heuristics"):
                return lambda *_, **__: lambda f: f
            if name[:1].isupper():
                return type(name, (), {"__init__": lambda self, *a, **k: None})
            return MagicMock(name=name)

    def __init__(self, *names: str) -> None:
        self.names = names

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        ours = any(name == known or name.startswith(f"{known}.") for known in self.names)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = self.Module(spec.name)
        module.__version__ = "3.7.0"
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def without_triton() -> None:
    """Torch asks for Triton first (it must find none), then the stand-in is installed."""
    import torch._dynamo
    import torch._inductor.runtime.hints
    import torch._inductor.runtime.triton_compat  # noqa: F401
    import torch.utils._triton as probes

    probes.has_triton_package()
    probes.has_triton()
    sys.meta_path.append(StandIn("triton"))
    if not hasattr(typing, "override"):  # Python 3.12's, which Megatron imports
        typing.override = lambda function: function  # type: ignore[attr-defined]
