"""Recompute: which parts of a layer keep only their inputs and run again in backward (``Layout.recompute``).

``full`` wraps the layer; ``selective`` wraps the named parts where the layer calls them: core_attn (attention's kernel, context
parallelism included), mlp, moe and shared_experts keep their input and run again as a whole. Of layernorm, mlp_act (the product of
gate and up), moe_act and mla_up_proj it is the *output* that would be kept, by the products that read it: these run as ever, and
what they made is not kept but made again when the first of its readers asks for it in backward (``Recomputed.through``).
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from cost_models.layout import RecomputeRule
from profiles.errors import AxisplanError, InputError

PARTS = ("core_attn", "mlp_act", "mlp", "layernorm", "moe", "moe_act", "shared_experts", "mla_up_proj")


class Recomputed:
    """The rule of one layer: called with a part's name, it runs the part, or runs it keeping its inputs only."""

    def __init__(self, rule: RecomputeRule) -> None:
        unknown = [m for m in rule.modules if m not in PARTS]
        if rule.mode == "selective" and unknown:
            raise InputError("recompute", unknown[0], f"the runtime recomputes {', '.join(PARTS)}", "core_attn")
        self.full = rule.mode == "full"
        self.parts = frozenset(rule.modules) if rule.mode == "selective" else frozenset()

    def __call__(self, part: str, function: Callable[..., Any], *arguments: Any) -> Any:
        return again(function, *arguments) if part in self.parts else function(*arguments)

    def through(self, part: str, make: Callable[..., Any], arguments: tuple[Any, ...], use: Callable[[Any], Any]) -> Any:
        """``use(make(*arguments))``; where the part is recomputed, what ``make`` returns is not among the tensors that ``use`` saves
        for backward. ``make`` may communicate: every rank of its axis then makes it again at the same place of its backward."""
        if part not in self.parts or not torch.is_grad_enabled():
            return use(make(*arguments))
        made = make(*arguments)
        remake = Remake(make, arguments, made if isinstance(made, tuple) else (made,))
        with saved_tensors_hooks(remake.pack, remake.unpack):
            return use(made)


class Token:
    """Stands for a tensor among those that a node of the graph saves for backward, and lives as long as the node keeps it."""

    def __init__(self, tensor: Tensor, place: int) -> None:
        self.place = place
        self.view = (tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


class Standing(ABC):
    """Hands out tokens for tensors, and on the first that is asked for makes again what all of them stand for: once, however many
    passes a split backward takes. What was made goes with its token."""

    def __init__(self) -> None:
        self.tokens: list[weakref.ref[Token]] = []
        self.made: WeakKeyDictionary[Token, Tensor] = WeakKeyDictionary()

    def token(self, tensor: Tensor, place: int) -> Token:
        made = Token(tensor, place)
        self.tokens.append(weakref.ref(made))
        return made

    def tensor(self, token: Token) -> Tensor:
        if token not in self.made:
            self.make_again()
        return self.made[token]

    @abstractmethod
    def make_again(self) -> None:
        """Fill ``made`` for every token that lives."""


class Remake(Standing):
    """Stands for the outputs of ``make`` among saved tensors."""

    def __init__(self, make: Callable[..., Any], arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.make, self.arguments = make, arguments
        self.storages = {t.untyped_storage()._cdata: i for i, t in enumerate(outputs)}

    def pack(self, saved: Tensor) -> Tensor | Token:
        place = self.storages.get(saved.untyped_storage()._cdata)
        if place is None:
            return saved.detach()  # itself it would keep alive the graph that keeps it
        return self.token(saved, place)

    def unpack(self, kept: Tensor | Token) -> Tensor:
        return kept if isinstance(kept, Tensor) else self.tensor(kept)

    def make_again(self) -> None:
        with torch.no_grad():
            made = self.make(*self.arguments)
        outputs = made if isinstance(made, tuple) else (made,)
        for token in (ref() for ref in self.tokens):
            if token is not None:
                self.made[token] = outputs[token.place].as_strided(*token.view)


class Rerun(Standing):
    """Stands for everything that ``function`` saves: it runs again, up to the last of these tensors."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        super().__init__()
        self.function, self.arguments = function, arguments

    def pack(self, saved: Tensor) -> Token:
        return self.token(saved, len(self.tokens))

    def make_again(self) -> None:
        saved_again = 0

        def keep(saved: Tensor) -> Tensor:
            nonlocal saved_again
            token = self.tokens[saved_again]()
            saved_again += 1
            if token is not None:
                self.made[token] = saved.detach()
            if saved_again == len(self.tokens):
                raise _Enough
            return saved.detach()

        try:
            with torch.enable_grad(), saved_tensors_hooks(keep, lambda saved: saved):
                self.function(*self.arguments)
        except _Enough:
            return
        raise AxisplanError(f"a recomputation saved {saved_again} tensors, the forward {len(self.tokens)}")


class _Enough(Exception):
    """Everything that backward asks for is there."""


def again(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run ``function`` keeping its inputs only; it runs again in backward. It must not draw random numbers."""
    rerun = Rerun(function, arguments)
    with saved_tensors_hooks(rerun.pack, rerun.tensor):
        return function(*arguments)
