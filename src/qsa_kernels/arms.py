"""The arms that the report compares: one combination of cache type, scale placement, decoder and contraction each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arm:
    """One named way to run `sparse_paged_attention`.

    Args:
        name (str): the label used in every table and figure.
        kv_cache_dtype (str): "auto" for an unquantised cache, "fp8_e4m3" for E4M3FN codes.
        scale_placement (str | None): "in_loop" or "hoisted"; None where there is no scale.
        decoder (str | None): "exp2", "bitcast", "packed" or "native"; None where nothing is decoded.
        contraction (str): "dot" or "vector".
    """

    name: str
    kv_cache_dtype: str
    scale_placement: str | None
    decoder: str | None
    contraction: str

    @property
    def is_quantised(self) -> bool:
        return self.kv_cache_dtype != "auto"

    def options(self) -> dict[str, str]:
        """Keyword arguments of `sparse_paged_attention` that select this arm."""
        options = {"kv_cache_dtype": self.kv_cache_dtype, "contraction": self.contraction}
        if self.scale_placement is not None:
            options["scale_placement"] = self.scale_placement
        if self.decoder is not None:
            options["decoder"] = self.decoder
        return options


ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm("fp16", "auto", None, None, "dot"),
        Arm("in_loop/exp2", "fp8_e4m3", "in_loop", "exp2", "dot"),
        Arm("hoisted/exp2", "fp8_e4m3", "hoisted", "exp2", "dot"),
        Arm("in_loop/bitcast", "fp8_e4m3", "in_loop", "bitcast", "dot"),
        Arm("hoisted/bitcast", "fp8_e4m3", "hoisted", "bitcast", "dot"),
        Arm("hoisted/packed", "fp8_e4m3", "hoisted", "packed", "dot"),
        Arm("hoisted/native", "fp8_e4m3", "hoisted", "native", "dot"),
        Arm("fp16+vector", "auto", None, None, "vector"),
        Arm("hoisted/packed+vector", "fp8_e4m3", "hoisted", "packed", "vector"),
    )
}
