"""Videos: which of their frames a model sees, and what stands for them in a prompt.

A video is a row of images here: each holds as many frames as an embedding spans, has embeddings of its own, and is
found again by its own digest. What differs from family to family is data: where frames are taken from, and the words
around them. The rules are those of the families' own processors, as published with their checkpoints.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

MOST_PIXELS = 12 << 20
"""Of all resized frames of a video."""
LEAST_TOKENS = 64
"""Of the frames of Kimi K2.5 with one embedding, before there are fewer of them."""
SPARE = 1.05
"""Qwen's processors let frames have this much more than the least area when there are too many of them."""
UNITS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


class Frames(NamedTuple):
    """The resized frames of a video, as the child process gives them."""

    shape: tuple[int, int, int]
    """Frames, and rows and columns of pixels of each."""
    places: list[int]
    """The number of each in the video."""
    total: int
    """Frames of the video."""
    rate: float
    """Its frames a second."""
    pixels: bytes


@dataclass(frozen=True, kw_only=True)
class VideoForm:
    """How a family's prompts have videos."""

    settings: Mapping[str, Any]
    """Those of ``image_decoder.prepared`` for a frame, and of ``sampled``."""
    placeholder: str
    """What the chat template writes for a video."""
    each: str
    """What is written for frames with one embedding; ``{token}`` becomes the tokens of an image."""
    between: str = ""
    before: str = ""
    after: str = ""
    group: int = 1
    """Frames that an embedding spans."""
    fills_groups: bool = True
    """Whether the last group is as long as the others, with the last frame once more."""
    num_tokens: int = 0
    """Embeddings of a frame, where all have as many."""
    is_middle: bool = False
    """Whether the time of a group is the mean of its first and its last frame's, and not the first one's."""
    rope_rate: float | None = None
    """Rotary positions of a second, where no text is between frames; 0: one for each group."""
    details: Callable[[bool], tuple[int, ...]] = lambda is_last: ()
    """What the tower has to know of a frame."""

    def written(self, frames: Frames, token: str) -> str:
        """What the model reads in place of the placeholder, with one token for each group of frames."""
        seconds = frames.total / frames.rate
        values = {"count": in_words(len(frames.places)), "duration": clock(seconds, hours=True)}
        groups = [
            self.each.format(
                token=token, number=number, seconds=time, whole=int(time), clock=clock(time), stamp=stamp(time)
            )
            for number, time in enumerate(self.times(frames), 1)
        ]
        return self.before.format(**values) + self.between.join(groups) + self.after

    def times(self, frames: Frames) -> list[float]:
        """The time of each group, in seconds."""
        seconds = [place / frames.rate for place in frames.places]
        seconds += seconds[-1:] * (-len(seconds) % self.group)
        last = self.group - 1 if self.is_middle else 0
        return [(seconds[i] + seconds[i + last]) / 2 for i in range(0, len(seconds), self.group)]

    def elapsed(self, frames: Frames, number: int) -> int | None:
        """Rotary positions from the video's first group to a later one that follows without text."""
        if self.rope_rate is None or not number:
            return None
        if not self.rope_rate:
            return number
        seconds_of_frame = frames.total / frames.rate / len(frames.places)
        return int(number * self.rope_rate * self.group * seconds_of_frame)

    def limited(self, most_tokens: int) -> VideoForm:
        """The form whose videos have no more than so many tokens and ``MOST_PIXELS`` pixels, by fewer or smaller
        frames."""
        found, group = dict(self.settings), self.group
        if found["rule"] == "padded":
            most = min(most_tokens, MOST_PIXELS // (found["factor"] ** 2 * group))
            frames = max(1, most // LEAST_TOKENS) * group
            return dataclasses.replace(
                self, settings=found | {"budget": most, "most_frames": min(found["most_frames"], frames)}
            )
        if self.num_tokens:
            pixels = found.get("side", 0) ** 2 or found.get("height", 0) * found.get("width", 0)
            pixels = pixels or found["most"] * found["factor"] ** 2
            most = min(most_tokens // self.num_tokens, MOST_PIXELS // pixels)
            return dataclasses.replace(self, settings=found | {"most_frames": max(1, min(found["most_frames"], most))})
        area = found["factor"] ** 2
        most = min(most_tokens * area * group, MOST_PIXELS)
        smallest = found["least"] * SPARE if "total" in found else area
        found["most_frames"] = max(group, min(found["most_frames"], int(most / smallest)))
        if "total" in found:
            found["total"] = min(found["total"], most // group)
        else:
            found |= {"most": min(found["most"], most), "least": min(found["least"], most)}
        return dataclasses.replace(self, settings=found)


def for_frames(settings: Mapping[str, Any], count: int, group: int) -> dict[str, Any]:
    """The settings by which each of so many frames is resized."""
    found = dict(settings)
    if "budget" in found:
        return found | {"most_tokens": found["budget"] // -(-count // group)}
    if "total" in found:  # qwen-vl-utils
        share = found["total"] * group // max(count, group)
        return found | {"most": max(min(found["most"], share), int(found["least"] * SPARE)), "group": 1}
    return found | {"num_frames": max(count, group), "group": group}


def sampled(total: int, rate: float, settings: Mapping[str, Any]) -> list[int]:
    """The numbers of the frames that a model sees, of ``total`` at ``rate`` a second."""
    chosen = SAMPLINGS[settings["sampling"]](total, rate, settings)
    if len(chosen) <= (most := settings["most_frames"]):
        return chosen
    return [chosen[place] for place in _evenly(0, len(chosen) - 1, most)]


def _evenly(first: float, last: float, count: int, rounded: Callable[[float], int] = round) -> list[int]:
    """So many numbers from ``first`` to ``last``."""
    step = (last - first) / max(1, count - 1)
    return [rounded(last if place and place == count - 1 else first + place * step) for place in range(count)]


def _by_rate(total: int, rate: float, settings: Mapping[str, Any]) -> list[int]:
    """So many frames a second, the first and the last one included (Qwen)."""
    count = int(total / rate * settings["fps"]) if settings["fps"] else total
    count = min(max(count, settings["least_frames"]), settings["most_frames"], total)
    multiple = settings.get("multiple", 1)
    return _evenly(0, total - 1, max(1, count // multiple * multiple))


def _from_starts(total: int, rate: float, settings: Mapping[str, Any]) -> list[int]:
    """So many frames, or so many a second, each the first of its part (Gemma 4, Kimi K2.5)."""
    count = int(total / rate * settings["fps"]) if settings["fps"] else total
    count = max(1, min(count, settings["most_frames"], total))
    return [place * total // count for place in range(count)]


def _by_seconds(total: int, rate: float, settings: Mapping[str, Any]) -> list[int]:
    """The first frame of each part of a second (GLM-4.1V)."""
    fps, longest = settings["fps"], settings["longest"]
    duration = total / rate
    if duration <= longest:
        count = max(1, math.floor(duration * fps))
        return _even_number([min(total - 1, math.ceil(place * rate / fps)) for place in range(count)])
    count = int(longest * fps)
    if count >= total:
        return _even_number(list(range(total)))
    step = duration / max(1, count - 1)
    return _even_number([min(total - 1, math.ceil(place * step * rate)) for place in range(count)])


def _by_duration(total: int, rate: float, settings: Mapping[str, Any]) -> list[int]:
    """Fewer frames a second of longer videos (GLM-4.6V)."""
    duration = total / rate
    kept = min(duration, 2400)
    fps = 3 if kept <= 30 else 1 if kept <= 300 else 0.5
    count = max(1, min(int(kept * fps * 2), 640))
    if total < count:
        return _even_number(_evenly(0, total - 1, count, math.floor))
    found, second = list[int](), 0.0
    for place in range(total):
        if place * (1 / rate) >= second:
            second += 1 / (2 * fps)
            found.append(place)
            if second >= int(duration):
                break
    if len(found) < count:
        found = _evenly(found[0], found[-1], count, math.floor)
    elif len(found) > count:
        found = _evenly(0, total - 1, count, math.floor)
    return _even_number(found)


def _even_number(places: list[int]) -> list[int]:
    """Each once, and the last one twice if the number of frames is odd else."""
    found = list(dict.fromkeys(places))
    return found + found[-1:] * (len(found) % 2)


def _in_middles(total: int, rate: float, settings: Mapping[str, Any]) -> list[int]:
    """The middles of so many equal parts (InternVL)."""
    count = min(total, settings["most_frames"])
    step = total / count
    return [min(total - 1, int(step / 2 + place * step)) for place in range(count)]


def _inside(total: int, rate: float, settings: Mapping[str, Any]) -> list[int]:
    """So many frames a second, without the ends of a long video (SmolVLM)."""
    fps, most, skipped = settings["fps"], settings["most_frames"], settings["skipped"]
    duration = total / rate
    count = max(1, min(round(fps * duration), most))
    first, last = 0, total - 1
    if skipped > 0 and duration - 2 * skipped > most * fps:
        first, last = int(skipped * rate), min(total - 1, int(total - skipped * rate))
    if first >= last:
        first, last = 0, total - 1
    return sorted(set(_evenly(first, last, count, math.floor)))


def _all(total: int, rate: float, settings: Mapping[str, Any]) -> list[int]:
    return list(range(total))


SAMPLINGS: dict[str, Callable[[int, float, Mapping[str, Any]], list[int]]] = {
    "all": _all,
    "duration": _by_duration,
    "inside": _inside,
    "middles": _in_middles,
    "rate": _by_rate,
    "seconds": _by_seconds,
    "starts": _from_starts,
}


def clock(seconds: float, hours: bool = False) -> str:
    """Minutes and seconds, or hours before them."""
    whole = int(seconds)
    if hours:
        return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
    return f"{whole // 60:02}:{whole % 60:02}"


def stamp(seconds: float) -> str:
    """Hours, minutes, seconds and milliseconds."""
    whole = int(seconds)
    return f"{whole // 3600 % 24:02}:{clock(whole % 3600)}.{int(seconds % 1 * 1000):03}"


def in_words(number: int) -> str:
    """A number under 1,000 in English; a larger one in digits."""
    if number < 20:
        return UNITS[number]
    if number < 100:
        tens = TENS[number // 10 - 2]
        return f"{tens}-{UNITS[number % 10]}" if number % 10 else tens
    if number < 1000:
        hundreds = f"{UNITS[number // 100]} hundred"
        return f"{hundreds} and {in_words(number % 100)}" if number % 100 else hundreds
    return str(number)
