"""Padded batch shapes: the sizes to which steps are padded, so that one CUDA graph serves many steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple


class StepKind(NamedTuple):
    """What a step computes in addition to plain sampling."""

    has_extras: bool = False
    """Penalties, biases, bans, masks or log-probabilities of any sequence."""
    has_adapters: bool = False
    """Whether the step uses LoRA kernels."""
    has_drafter: bool = False
    """Whether a drafter runs after the step."""
    num_proposed: int = 0
    """Drafts that the drafter makes for each sequence, at most; with 0 it only fills its cache."""


PLAIN = StepKind()


class StepShape(NamedTuple):
    """Sizes of a step's tensors; rows and sequences beyond those of the plan are padding."""

    num_rows: int
    """Tokens computed, drafts included."""
    num_seqs: int
    max_query_len: int
    has_extras: bool = False
    has_adapters: bool = False
    has_drafter: bool = False
    num_proposed: int = 0
    num_drafts: int = 0
    """Drafts of all sequences that are verified; one token is sampled for each draft and one more for each sequence."""
    has_long_context: bool = False
    """Whether more programs share a context in decode attention. Any step can be computed either way."""
    has_images: bool = False
    """Whether rows may be embeddings of images: of a model that takes any, those of all graphs with prefill."""
    num_axes: int = 0
    """Axes of the model's rotary positions where they may differ from the positions of tokens; 0: they never do."""
    most_context: int = 0
    """Positions of the longest context, if models that attend to chosen positions then attend to all; 0: any."""

    @property
    def num_samples(self) -> int:
        """Rows whose logits are sampled."""
        return self.num_seqs + self.num_drafts

    @property
    def is_verification(self) -> bool:
        """Whether the step has drafts and every row is sampled."""
        return self.num_drafts > 0 and self.num_rows == self.num_samples

    def holds(self, other: StepShape) -> bool:
        """Whether a step of shape ``other`` can be padded to this one."""
        are_alike = (self.max_query_len == 1) == (other.max_query_len == 1)
        are_alike = are_alike and self[3:6] == other[3:6] and self.num_proposed >= other.num_proposed
        are_alike = are_alike and (self.num_drafts > 0) == (other.num_drafts > 0)
        are_alike = are_alike and self.is_verification == other.is_verification
        are_alike = are_alike and self.has_long_context <= other.has_long_context
        are_alike = are_alike and self.most_context in (0, other.most_context)
        is_as_large = self.num_rows >= other.num_rows and self.num_seqs >= other.num_seqs
        return are_alike and is_as_large and self.num_drafts >= other.num_drafts


class PlanSizes(NamedTuple):
    """Sizes of a plan before padding."""

    num_rows: int
    num_seqs: int
    max_query_len: int
    num_drafts: int = 0
    is_plain: bool = True
    """Whether the step consists of its arrays alone, so that it may run through a graph."""
    longest_context: int = 0
    """Positions of the longest of up to ``LONG_SEQS`` sequences; 0 if there are more."""
    most_context: int = 0
    """That of the step's shape."""


ChooseShape = Callable[[PlanSizes, StepKind], tuple[StepShape, bool]]
"""Returns the shape of a step, and whether it is run through a CUDA graph."""


def exact_shape(sizes: PlanSizes, kind: StepKind) -> tuple[StepShape, bool]:
    """The unpadded shape of a step, for executors without graphs."""
    return StepShape(sizes.num_rows, sizes.num_seqs, sizes.max_query_len, *kind, sizes.num_drafts), False


BATCH_SIZES = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240)
"""Batch sizes of decode graphs; above the largest, every multiple of 32."""
MIXED_ROWS = (*(16, 32, 48, 64, 96, 128, 144, 160, 192, 224, 256, 288, 320, 384, 448, 512), *range(640, 2049, 128))
"""Rows of graphs with prefill. Longer steps keep the device busy without a graph."""
LONG_SEQS = 4
"""Most sequences of decode graphs for long contexts: more fill the device, however long they are."""
LONG_CONTEXT = 4096
"""Positions from which on programs are worth sharing a context that in a short one only had more sums to add up."""
FEW_ROWS = 512
FEW_SEQS, MANY_SEQS = (8, 32), (8, 64)
"""Sequences of graphs with prefill of at most FEW_ROWS, and with more; above the largest, ``max_num_seqs``. The fewer
they are, the more programs share the context of one in decode attention: with 64 there is one for each kv head."""
DRAFT_MIXED_ROWS = (*(64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536), MIXED_ROWS[-1])
"""``MIXED_ROWS`` of steps with drafts: fewer, since drafts and prompts come in many numbers."""
EXTRA_BATCH_SIZES = (1, 4, 16, 32, 64, 128, 192, 256)
EXTRA_MIXED_ROWS = (64, 256, 512, 1024, MIXED_ROWS[-1])
"""``BATCH_SIZES`` and ``MIXED_ROWS`` of steps with extras: fewer, since such steps are rarer."""


def padded(size: int, sizes: tuple[int, ...], step: int) -> int:
    """The smallest of ``sizes`` that is at least ``size``; above them all, the next multiple of ``step``."""
    return next((known for known in sizes if known >= size), -(-size // step) * step)


MAX_DRAFTS = 32
"""Most drafts of a sequence in a step."""
NO_DRAFTER = -1
"""In place of the number of drafts that a drafter makes: it does not run."""


def all_drafts(makes_drafts: bool) -> int:
    """``StepShape.num_proposed`` where a drafter makes as many drafts as it can, or none."""
    return MAX_DRAFTS if makes_drafts else 0


def padded_drafts(num_drafts: int) -> int:
    """The smallest power of 2 that is at least ``num_drafts``."""
    return 1 << max(0, num_drafts - 1).bit_length()


class GraphLimits(NamedTuple):
    """What decides which shapes have graphs."""

    max_num_seqs: int
    max_num_rows: int
    has_adapters: bool = False
    max_drafts: int = 0
    """Drafts of a sequence in a step."""
    has_drafter: bool = False
    longest_context: int = 0
    """Positions of a sequence, or 0 if kernels are the same for all lengths."""
    dense_context: int = 0
    """``StepShape.most_context`` of steps whose contexts are so short; 0: of a model to which that makes no difference,
    or whose contexts all are."""

    def with_dense(self, shapes: set[StepShape]) -> set[StepShape]:
        """These, and the same for short contexts."""
        return shapes | {shape._replace(most_context=self.dense_context) for shape in shapes}


def kinds(with_adapters: bool, has_drafter: bool = False) -> list[StepKind]:
    """All kinds of steps. With adapters, every step with extras uses LoRA kernels: such steps are rare.

    A drafter may make drafts in a step, or only fill its cache, or rest.
    """
    own = [PLAIN._replace(has_adapters=True)] if with_adapters else []
    found = [PLAIN, *own, PLAIN._replace(has_extras=True, has_adapters=with_adapters)]
    if not has_drafter:
        return found
    filling = [kind._replace(has_drafter=True) for kind in found]
    return [kind._replace(num_proposed=MAX_DRAFTS) for kind in filling] + filling + found


def padded_shape(
    num_rows: int,
    num_seqs: int,
    max_query_len: int,
    max_num_seqs: int,
    kind: StepKind = PLAIN,
    num_drafts: int = 0,
    longest_context: int = 0,
) -> tuple[StepShape, bool]:
    """The padded shape of a step, and whether it has a CUDA graph. Its drafter makes all of its drafts or none."""
    kind = kind._replace(num_proposed=all_drafts(kind.num_proposed > 0))
    if num_drafts and num_rows == num_seqs + num_drafts:
        return verification_shape(num_seqs, num_drafts, max_num_seqs, kind), True
    if num_drafts:
        num_drafts = padded_drafts(num_drafts)
        num_rows = max(num_rows, num_drafts + num_seqs + 1)
        shape, has_graph = padded_shape(num_rows, num_seqs, max_query_len, max_num_seqs, kind)
        rows = max(shape.num_rows, shape.num_seqs + num_drafts + 1)  # not every row is sampled
        rows, has_graph = padded(rows, DRAFT_MIXED_ROWS, 128), has_graph and rows <= DRAFT_MIXED_ROWS[-1]
        return shape._replace(num_rows=rows, max_query_len=rows, num_drafts=num_drafts), has_graph
    most_seqs = max(max_num_seqs, num_seqs)
    if max_query_len == 1:
        size = min(padded(num_seqs, EXTRA_BATCH_SIZES if kind.has_extras else BATCH_SIZES, 32), most_seqs)
        is_long = size <= LONG_SEQS and longest_context >= LONG_CONTEXT
        return StepShape(size, size, 1, *kind, has_long_context=is_long), True
    seqs = min(padded(num_seqs, _mixed_seqs(num_rows), max_num_seqs), most_seqs)
    if num_rows <= MIXED_ROWS[-1]:
        rows = padded(num_rows, EXTRA_MIXED_ROWS if kind.has_extras else MIXED_ROWS, 1)
        return StepShape(rows, seqs, rows, *kind), True
    rows = -(-num_rows // 128) * 128
    return StepShape(rows, seqs, rows, *kind), False


def verification_shape(num_seqs: int, num_drafts: int, max_num_seqs: int, kind: StepKind = PLAIN) -> StepShape:
    """The padded shape of a step of decodes and their drafts."""
    seqs = min(padded(num_seqs, EXTRA_BATCH_SIZES, 32), max(max_num_seqs, num_seqs))
    drafts = padded_drafts(num_drafts)
    return StepShape(seqs + drafts, seqs, 1 + MAX_DRAFTS, *kind, drafts)


def _verification_shapes(limits: GraphLimits, kind: StepKind) -> set[StepShape]:
    """All padded shapes with up to ``max_drafts`` drafts for each sequence."""
    shapes, max_num_seqs, max_drafts = set(), limits.max_num_seqs, limits.max_drafts
    for seqs in {min(size, max_num_seqs) for size in (*EXTRA_BATCH_SIZES, max_num_seqs)}:
        drafts = padded_drafts(seqs * max_drafts) if max_drafts else 0
        while drafts:
            shapes.add(verification_shape(seqs, drafts, max_num_seqs, kind))
            drafts //= 2
    return shapes


def _mixed_draft_shapes(limits: GraphLimits, kind: StepKind) -> set[StepShape]:
    """Padded shapes with prompts and ``max_drafts`` drafts for each sequence but that of one prompt."""
    shapes, max_num_seqs, max_drafts = set(), limits.max_num_seqs, limits.max_drafts
    for rows in DRAFT_MIXED_ROWS if max_drafts and not kind.has_extras else ():
        for seqs in {min(size, max_num_seqs) for size in (*_mixed_seqs(rows), max_num_seqs)}:
            drafts = (seqs - 1) * max_drafts
            if 0 < drafts < rows - seqs and rows <= limits.max_num_rows:
                shapes.add(padded_shape(rows, seqs, rows, max_num_seqs, kind, drafts))
    return {shape for shape, has_graph in shapes if has_graph}


def _mixed_seqs(num_rows: int) -> tuple[int, ...]:
    return FEW_SEQS if num_rows <= FEW_ROWS else MANY_SEQS


def graph_shapes(limits: GraphLimits) -> list[StepShape]:
    """All shapes with a graph, the largest first, so that smaller ones reuse its memory; those with extras last.

    Of steps with both prompts and drafts there are those in which nearly all sequences have all drafts, and no extras:
    other graphs are captured when they are first used.
    """
    shapes, max_num_seqs = set(), limits.max_num_seqs
    for kind in kinds(limits.has_adapters, limits.has_drafter):
        if bool(kind.num_proposed) == limits.has_drafter:  # what verifies drafts makes the next ones
            shapes |= _verification_shapes(limits, kind) | _mixed_draft_shapes(limits, kind)
        for size, longest in itertools.product(range(1, max_num_seqs + 1), {0, limits.longest_context}):
            shapes.add(padded_shape(size, size, 1, max_num_seqs, kind, longest_context=longest)[0])
        for rows in MIXED_ROWS:
            for seqs in (*_mixed_seqs(rows), max_num_seqs) if rows <= limits.max_num_rows else ():
                few = min(seqs, rows - 1, max_num_seqs)
                shapes.add(padded_shape(rows, few, rows, max_num_seqs, kind)[0])
    return sorted(limits.with_dense(shapes), key=lambda shape: (not shape.has_extras, shape), reverse=True)


def first_shapes(limits: GraphLimits) -> list[StepShape]:
    """A few shapes that hold every step without extras that has a graph, the largest first, and that of one sequence,
    which would take three times as long with the kernels of many.

    Startup waits for them, so each one must be worth its kernels' compilation.
    """
    max_num_seqs, max_num_rows, has_adapters, max_drafts, has_drafter, *_ = limits
    shapes = {_decode_shape(size, max_num_seqs) for size in (1, max_num_seqs)}
    most_drafts = max_num_seqs * max_drafts
    for rows, drafts in itertools.product((512, min(max_num_rows, MIXED_ROWS[-1])), {0, most_drafts}):
        if 1 < rows <= max_num_rows:
            seqs = min(rows - 1, max_num_seqs)
            shape, has_graph = padded_shape(rows, seqs, rows, max_num_seqs, num_drafts=drafts)
            shapes |= {shape} if has_graph else set()
    if has_adapters:
        without_drafts = {shape for shape in shapes if not shape.num_drafts}
        shapes |= {shape._replace(has_adapters=True) for shape in _largest(without_drafts)}
    if max_drafts:
        shapes |= {verification_shape(size, size * max_drafts, max_num_seqs) for size in (1, max_num_seqs)}
    plain = {shape for shape in shapes if has_drafter and not shape.num_drafts}
    found = {*plain, *(_with_drafter(shape, has_drafter) for shape in shapes)}
    return sorted(limits.with_dense(found), reverse=True)


def longest_shapes(limits: GraphLimits) -> list[StepShape]:
    """The longest steps without extras, if they have no graph: startup compiles their kernels as well."""
    shape, has_graph = padded_shape(limits.max_num_rows, 1, limits.max_num_rows, limits.max_num_seqs)
    shapes = set() if has_graph else {shape, _with_drafter(shape, limits.has_drafter)}
    if limits.has_adapters:
        shapes |= {shape._replace(has_adapters=True) for shape in shapes}
    return sorted(limits.with_dense(shapes), reverse=True)


EARLY_MIXED_ROWS = (64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024, 1536, MIXED_ROWS[-1])
EARLY_VERIFICATIONS = (4, 16, 64)
"""Sequences whose drafts are verified."""


def early_shapes(limits: GraphLimits) -> list[StepShape]:
    """Shapes that every step without extras and adapters needs less than twice the rows of, the largest first.

    With their graphs captured before it is ready, an engine is nearly as fast in its first second as later.
    """
    max_num_seqs, max_drafts = limits.max_num_seqs, limits.max_drafts
    sizes = {min(1 << i, max_num_seqs) for i in range(max_num_seqs.bit_length() + 1)}
    shapes = {_decode_shape(size, max_num_seqs) for size in sizes}
    for rows in EARLY_MIXED_ROWS:
        seqs = min(_mixed_seqs(rows)[-1], rows - 1, max_num_seqs)
        if rows <= limits.max_num_rows:
            shapes.add(padded_shape(rows, seqs, rows, max_num_seqs)[0])
    if max_drafts:
        few = {min(size, max_num_seqs) for size in EARLY_VERIFICATIONS}
        shapes |= {verification_shape(size, size * max_drafts, max_num_seqs) for size in few}
    return sorted({_with_drafter(shape, limits.has_drafter) for shape in shapes}, reverse=True)


NEXT_SEQS, NEXT_MIXED_ROWS = 16, 256


def next_shapes(limits: GraphLimits) -> list[StepShape]:
    """Shapes to compile next, the smallest first: small batches are faster with their own kernels."""
    max_num_seqs, max_num_rows, _, max_drafts, has_drafter, *_ = limits
    few, seqs = min(NEXT_SEQS, max_num_seqs), min(FEW_SEQS[-1], max_num_seqs)
    shapes = {_decode_shape(few, max_num_seqs)}
    if max_num_rows >= NEXT_MIXED_ROWS:
        shapes.add(padded_shape(NEXT_MIXED_ROWS, seqs, NEXT_MIXED_ROWS, max_num_seqs)[0])
    resting = set(shapes) if has_drafter else set()
    if max_drafts:
        shapes.add(verification_shape(few, few * max_drafts, max_num_seqs))
    if max_drafts and seqs * (1 + max_drafts) < NEXT_MIXED_ROWS <= max_num_rows:
        drafts = seqs * max_drafts
        shapes.add(padded_shape(NEXT_MIXED_ROWS, seqs, NEXT_MIXED_ROWS, max_num_seqs, num_drafts=drafts)[0])
    return sorted({*resting, *(_with_drafter(shape, has_drafter) for shape in shapes)})


def _with_drafter(shape: StepShape, has_drafter: bool) -> StepShape:
    return shape._replace(has_drafter=has_drafter, num_proposed=all_drafts(has_drafter))


def _decode_shape(num_seqs: int, max_num_seqs: int) -> StepShape:
    size = min(num_seqs, max_num_seqs)
    return padded_shape(size, size, 1, max_num_seqs)[0]


def first_extra_shapes(limits: GraphLimits) -> list[StepShape]:
    """``first_shapes`` for steps with extras."""
    max_num_seqs, max_num_rows, has_adapters, max_drafts, has_drafter, *_ = limits
    kind = StepKind(True, has_adapters, has_drafter, all_drafts(has_drafter))
    largest = _largest(set(first_shapes(GraphLimits(max_num_seqs, max_num_rows))))
    shapes = {padded_shape(*shape[:3], max_num_seqs, kind)[0] for shape in largest}
    if max_drafts:
        shapes.add(verification_shape(max_num_seqs, max_num_seqs * max_drafts, max_num_seqs, kind))
    return sorted(shapes, reverse=True)


def _largest(shapes: set[StepShape]) -> set[StepShape]:
    """The largest decode shape, and the largest of all shapes."""
    return {max(shape for shape in shapes if shape.max_query_len == 1), max(shapes)}
