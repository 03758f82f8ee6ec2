"""Takes out the spaces that a tokenizer's decoder puts before punctuation, where the model's files ask for it.

They do so with `clean_up_tokenization_spaces`, which Transformers applies to a whole text; here it is done as text
comes. Made for tokenizers of words (WordPiece), whose decoders join all words by spaces.
"""

from __future__ import annotations

# In the order of Transformers' replacements.
_REPLACED = (
    *((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"), (" 's", "'s")),
    *((" 've", "'ve"), (" 're", "'re")),
)
_LONGEST = 4  # characters of what is replaced; it begins with a space


def without_spaces_before_punctuation(text: str) -> str:
    """The text as Transformers' clean_up_tokenization has it."""
    for old, new in _REPLACED:
        text = text.replace(old, new)
    return text


class SpaceCleaner:
    """The same for a text that comes in pieces; holds back what the next piece may change."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> str:
        """Adds text; returns what is certain now."""
        self._held += text
        end = len(self._held)
        while end and not self._is_certain(end):
            end -= 1
        certain, self._held = self._held[:end], self._held[end:]
        return without_spaces_before_punctuation(certain)

    @property
    def is_held(self) -> bool:
        """True if some text is held back."""
        return bool(self._held)

    def flush(self) -> str:
        """The rest of the text."""
        held, self._held = self._held, ""
        return without_spaces_before_punctuation(held)

    def _is_certain(self, end: int) -> bool:
        """True if nothing that is replaced can be across this place, whatever comes.

        That begins with a space less than `_LONGEST` characters before it. Where a space comes next, what is across
        can only be a quotation mark between two spaces.
        """
        if " " not in self._held[max(0, end - _LONGEST) : end]:
            return True
        return self._held[end : end + 1] == " " and self._held[end - 1] not in " '"
