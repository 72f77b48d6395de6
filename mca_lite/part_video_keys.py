"""Keys and rules of videos: which frames are taken, and their sizes."""

from dataclasses import dataclass

from .args_values import ArgumentGroup, arg, count
from .errors import Judge
from .tables import register_keys


@dataclass(kw_only=True)
class VideoArguments(ArgumentGroup):
    """Videos.

    The configuration keys for videos in the data: which frames are taken, and their sizes.
    """

    video_fps: float = arg(
        2.0, "frames taken of a second of a video file; of a list of frames, its rate", above=0
    )
    video_maxlen: int = count(128, "frames taken of a video file at most, from start to end")
    video_max_pixels: int = count(65536, "larger frames of videos are made smaller")
    video_min_pixels: int = count(256, "smaller frames of videos are made larger")

    def check(self, judge: Judge) -> None:
        """Check the keys for videos together. judge: a Judge (collects Problems of the
        configuration); it gets one if video_min_pixels is above video_max_pixels."""
        judge.expect(
            self.video_min_pixels <= self.video_max_pixels,
            "video_min_pixels video_max_pixels",
            f"it is above video_max_pixels, {self.video_max_pixels}",
            "a lower one",
        )


register_keys("video", VideoArguments)
