"""What decides, besides the bytes of data files, which examples they hold."""

import dataclasses
from typing import Any

from calm_beam.inputs.examples import RowKeys


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """How data are read; travels to workers.

    Attributes:
      data_format: One of `FORMATS`; None takes each file's own, by its suffix.
      inputs_field: Name of the field with the prompt; None takes the format's usual one.
      targets_field: Name of the field with the references; None takes the format's usual one.
      seqio_modules: Modules to import, in which SeqIO tasks are registered.
      cluster_key: Name of the field with the name of an example's cluster; None reads no clusters.
      group_key: Name of the field with the name of an example's group; None reads no groups.
      needs_references: Whether an example without references is an error.
      has_vocabulary: Whether outputs become texts; if not, references that are texts are an error.
    """

    data_format: str | None = None
    inputs_field: str | None = None
    targets_field: str | None = None
    seqio_modules: tuple[str, ...] = ()
    cluster_key: str | None = None
    group_key: str | None = None
    needs_references: bool = False
    has_vocabulary: bool = True

    def keys(self, *, inputs: str, targets: str) -> RowKeys:
        """Returns where rows have what; `inputs` and `targets` are the format's usual names."""
        return RowKeys(
            inputs=self.inputs_field or inputs,
            targets=self.targets_field or targets,
            cluster=self.cluster_key,
            group=self.group_key,
            needs_references=self.needs_references,
            has_vocabulary=self.has_vocabulary,
        )

    def choices(self) -> dict[str, Any]:
        """Returns by name what was chosen about the form of the data; nothing where all is as usual."""
        chosen = {
            "data_format": self.data_format,
            "inputs_field": self.inputs_field,
            "targets_field": self.targets_field,
            "seqio_modules": list(self.seqio_modules),
        }
        return {name: value for name, value in chosen.items() if value}


AS_USUAL = Reading()
