"""The structs of src/native/kvant.h: their fields by name, in C order.

Every field takes 8 bytes: a pointer, an integer or a double. So a struct is packed from numbers in
the order of its fields, and one in memory is an array of 8-byte integers. tests/native compares
each name and type with the header.
"""

from __future__ import annotations

from struct import Struct


class NativeStruct:
    """One struct of the header. A nested struct's fields are named as "open.data"."""

    def __init__(self, c_name: str, *parts: str | tuple[str, NativeStruct], doubles: str = ""):
        names: list[str] = []
        for part in parts:
            if isinstance(part, str):
                names += part.split()
            else:
                prefix, nested = part
                names += (f"{prefix}.{name}" for name in nested.names)
        self.c_name = c_name
        self.names: tuple[str, ...] = tuple(names)
        self.doubles = frozenset(doubles.split())
        self.null = (0,) * len(names)  # its fields where there is nothing to point to
        format_codes = ("d" if name in self.doubles else "q" for name in names)
        self.pack = Struct("@" + "".join(format_codes)).pack  # called per layer and token

    def index(self, name: str) -> int:
        """Return the position of a field, in units of 8 bytes."""
        return self.names.index(name)


NULL_POINTER = (0, 0)  # address and bytes
ROWS_STRUCT = NativeStruct("kvant_rows", "data nbytes batch head row")
OPEN_STRUCT = NativeStruct("kvant_open", "data nbytes slot head row")
PAGES_STRUCT = NativeStruct("kvant_pages", "data nbytes slot head")
SIDE_STRUCT = NativeStruct(
    "kvant_side",
    "format bits group dtype dim corrected arrangement",
    ("open", OPEN_STRUCT),
    ("codes", PAGES_STRUCT),
    ("scale", PAGES_STRUCT),
    ("bias", PAGES_STRUCT),
    "levels levels_nbytes boundaries boundaries_nbytes",
)
TABLE_STRUCT = NativeStruct("kvant_table", "data nbytes stride width")
PAGE_TABLE_STRUCT = NativeStruct(
    "kvant_extent",
    "batch page tail dense_until sinks numbers numbers_nbytes",
    ("sealed", TABLE_STRUCT),
    ("open", TABLE_STRUCT),
)
ATTEND_STRUCT = NativeStruct(
    "kvant_request",
    "keys keys_nbytes values values_nbytes extent extent_nbytes heads group queries",
    ("own_keys", ROWS_STRUCT),
    ("own_values", ROWS_STRUCT),
    "num_own num_dense causal window mask_sinks chunk scale softcap",
    "sink_logits sink_logits_nbytes",
    ("q", ROWS_STRUCT),
    "q_dtype out out_nbytes out_dtype lse lse_nbytes chosen chosen_nbytes num_chosen threads",
    doubles="scale softcap",
)
STORE_SIDE_STRUCT = NativeStruct("kvant_store_side", "stored stored_nbytes", ("rows", ROWS_STRUCT))
PLAN_STRUCT = NativeStruct(
    "kvant_steps",
    "copies copies_nbytes num_copies writes writes_nbytes num_writes seals seals_nbytes num_seals",
)
STORE_STRUCT = NativeStruct(
    "kvant_store_request",
    "sides batch heads page count steps steps_nbytes threads",
    ("side[0]", STORE_SIDE_STRUCT),
    ("side[1]", STORE_SIDE_STRUCT),
)
ROTATE_STRUCT = NativeStruct(
    "kvant_rotate_request",
    ("rows", ROWS_STRUCT),
    "dtype batch heads count dim signs signs_nbytes last out out_nbytes threads",
)
NORM_STRUCT = NativeStruct(
    "kvant_norm_request",
    "rows rows_nbytes weight weight_nbytes dtype count dim eps out out_nbytes threads",
    doubles="eps",
)
CHOOSE_STRUCT = NativeStruct(
    "kvant_choose_request",
    "extent extent_nbytes heads group queries dim",
    ("q", ROWS_STRUCT),
    "q_dtype",
    ("bounds", PAGES_STRUCT),
    "dtype ranges ranges_nbytes chosen chosen_nbytes num_chosen threads",
)
WEIGHT_STRUCT = NativeStruct(
    "kvant_weight",
    "format bits group dtype outs width part",
    "codes codes_nbytes scale scale_nbytes bias bias_nbytes",
)
MULTIPLY_STRUCT = NativeStruct(
    "kvant_multiply_request",
    "rows rows_nbytes count dtype weight weight_nbytes",
    "bias bias_nbytes bias_dtype out out_nbytes threads",
)
FOUR_STRUCT = NativeStruct("kvant_four", "first second third last")
ELEMENTS_STRUCT = NativeStruct("kvant_numbers", "data nbytes", ("stride", FOUR_STRUCT))
MAP_STRUCT = NativeStruct(
    "kvant_map_request",
    "operation dtype",
    ("shape", FOUR_STRUCT),
    ("a", ELEMENTS_STRUCT),
    ("b", ELEMENTS_STRUCT),
    ("out", ELEMENTS_STRUCT),
    "threads",
)
STEP_STRUCT = NativeStruct("kvant_step", "function request request_nbytes")
RUN_STRUCT = NativeStruct("kvant_run_request", "steps steps_nbytes num_steps")
