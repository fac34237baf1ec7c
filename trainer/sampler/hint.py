"""A hint to the processor, from within kernels: fetch a line of memory that is read soon."""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.extending import intrinsic

_READ, _EVERY_CACHE, _DATA = 0, 3, 1


def _prefetch(_typing: Any, array: Any, at: Any) -> Any:
    """``prefetch(array, at)``: ``array[at]``, of a contiguous 1-d array, is read soon. Any ``at`` does no harm."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        line = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(8).as_pointer())
        flag = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [line.type, flag, flag, flag])
        hint = builder.module.declare_intrinsic("llvm.prefetch", [line.type], kind)
        builder.call(hint, [line, flag(_READ), flag(_EVERY_CACHE), flag(_DATA)])
        return context.get_dummy_value()

    return types.void(array, types.int64), emit


prefetch: Any = intrinsic(_prefetch)
