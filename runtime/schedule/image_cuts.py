"""Where images let a chunk of a prompt end.

A step computes the features of its tokens' images, and has room for so many (FeatureBudget). Of a model whose tokens of
an image see what is ahead in it, one chunk has all of an image (with_whole_images). Free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from mllm_compile.runtime.media.request import RequestMedia


@dataclass(slots=True)
class FeatureBudget:
    """Features of images that a step may have.

    Attributes:
        most: of a whole step.
        left: features that fit beside the planned chunks'.
    """

    most: int
    left: int

    def cut(self, media: RequestMedia, start: int, length: int) -> int:
        """The length of a chunk that ends before an image which is one too many for the step; its first image never is.

        An image with tokens in earlier steps counts as well: its features have to be there.
        """
        for image in media.images_within(start, start + length):
            features = image.end - image.start
            if features > self.left and self.left < self.most:
                return max(0, image.start - start)
            self.left = max(0, self.left - features)
        return length


def with_whole_images(media: RequestMedia | None, start: int, length: int, most: int) -> int:
    """The length of a chunk that cuts no image whose tokens see what is ahead in it.

    It ends before such an image, or is all of it, or is 0 where that is more than `most`.
    """
    if media is None or not media.sees_ahead:
        return length
    for image in media.images:
        if image.sees_ahead and image.start < start + length < image.end:
            whole = image.end - start
            return image.start - start if image.start > start else whole if whole <= most else 0
    return length
