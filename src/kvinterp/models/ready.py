"""Whether a model computes what its hooks will see: not compiled, and not dropping out at random."""

from __future__ import annotations

from torch import nn

from kvinterp.errors import InputError, UnsupportedError

__all__ = ["check_evaluating", "check_uncompiled"]


def check_evaluating(model: nn.Module, name: str) -> None:
    """Refuses a model of which any part is in training mode.

    Raises:
        InputError: A module is; the message names it.
    """
    part = next((path for path, module in model.named_modules() if module.training), None)
    if part is not None:
        where = f"the module {part!r} of model {name}" if part else f"model {name}"
        raise InputError(
            f"{where} is in training mode, in which dropout changes what it computes: call model.eval() first."
        )


def check_uncompiled(model: nn.Module, name: str) -> None:
    """Refuses a model of which any part was compiled in place: what Dynamo compiled runs no hook that came later.

    Raises:
        UnsupportedError: A module was, by ``module.compile()`` or ``module.forward = torch.compile(module.forward)``.
    """
    for path, module in model.named_modules():
        forward = vars(module).get("forward")
        by_forward = hasattr(forward, "_torchdynamo_orig_callable")
        if getattr(module, "_compiled_call_impl", None) is not None or by_forward:
            where = f"the module {path!r} of model {name}" if path else f"model {name}"
            remedy = "delete its attribute 'forward'" if by_forward else "set its _compiled_call_impl to None"
            raise UnsupportedError(
                f"{where} is compiled, and compiled code runs no hooks, so nothing in it can be heard or patched: give the "
                f"model as it was before (copy.deepcopy(model), made before compiling), or {remedy}."
            )
