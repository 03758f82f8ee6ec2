"""Forms of answers: from what a caller asks for to masks of tokens."""
