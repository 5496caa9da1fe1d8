"""Measures kernels for the matrix products of the loaded model, as messages request it.

Nothing here decides when or for how long. A measurement is a reply, and takes effect by ``UseKernels`` alone, which
every executor of a model gets at the same place of the stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo.runtime.device_program import DeviceProgram
from octavo.steps.messages import MeasureKernels, PrepareTuning, Tuning, UseKernels
from octavo.steps.shapes import StepShape, all_drafts

if TYPE_CHECKING:
    from octavo.ops.triton.linear_tuning import LinearTuner


class KernelTuner:
    """Executes the messages of tuning."""

    def __init__(self, program: DeviceProgram) -> None:
        """``program``: over buffers that no step uses; it is run once, without launching a kernel."""
        self._device = program.device
        self._linear = self._of(program)

    def execute(self, message: Tuning) -> Any:
        """See ``Executor``."""
        from octavo.ops.triton.linear_configs import use

        match message:
            case PrepareTuning(num_rows, again):
                return self._linear.prepare(num_rows, again)
            case MeasureKernels(key):
                return self._linear.measure(key)
            case UseKernels(entries):
                return use(entries, self._device)

    def _of(self, program: DeviceProgram) -> LinearTuner:
        # Imported late: on a machine without a GPU there may be no Triton.
        from octavo.ops.triton.linear_tuning import LinearTuner
        from octavo.ops.triton.linear_uses import collecting

        with collecting() as uses:
            program(StepShape(1, 1, 1, has_drafter=program.has_drafter, num_proposed=all_drafts(program.has_drafter)))
        return LinearTuner(uses, self._device)
