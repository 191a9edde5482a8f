"""The raw codec: rows are stored unchanged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvant.codecs.frames.diagonal import Identity
from kvant.codecs.packing import check_dim
from kvant.contracts import Field, Fields, Form, Frame


@dataclass(frozen=True)
class Raw:
    """One field with the rows themselves, in their own dtype."""

    name: ClassVar[str] = "raw"
    frame: ClassVar[Frame] = Identity()
    exact: ClassVar[bool] = True
    limit: ClassVar[float] = math.inf
    tail: ClassVar[int] = 0
    form: ClassVar[Form] = Form("raw")

    def fields(self, dim: int) -> Mapping[str, Field]:
        check_dim(dim, multiple=1)
        return {"rows": Field(None, dim)}

    def seal(self, rows: Tensor) -> Fields:
        return {"rows": rows}

    def open(self, fields: Fields) -> Tensor:
        return fields["rows"]
