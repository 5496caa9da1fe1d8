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
    from octavo_kernels.triton.product_tuning import ProductTuner


class KernelTuner:
    """Executes the messages of tuning."""

    def __init__(self, program: DeviceProgram) -> None:
        """``program``: over buffers that no step uses; it is run once, without launching a kernel."""
        self._device = program.device
        self._products = self._of(program)

    def execute(self, message: Tuning) -> Any:
        """See ``Executor``."""
        from octavo_kernels.triton.product_tuning import use_entries

        match message:
            case PrepareTuning(num_rows, again):
                return self._products.prepare(num_rows, again)
            case MeasureKernels(key):
                return self._products.measure(key)
            case UseKernels(entries):
                return use_entries(entries, self._device)

    def _of(self, program: DeviceProgram) -> ProductTuner:
        # Imported late: on a machine without a GPU there may be no Triton.
        from octavo_kernels.triton.product_calls import collecting
        from octavo_kernels.triton.product_tuning import ProductTuner, uses_of

        with collecting() as calls:
            program(StepShape(1, 1, 1, has_drafter=program.has_drafter, num_proposed=all_drafts(program.has_drafter)))
        return ProductTuner(uses_of(calls), self._device)
