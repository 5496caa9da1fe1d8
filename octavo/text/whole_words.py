"""Byte-pair encoding without merging words that are tokens.

Merging a word from its characters looks up a pair for each of them and two for each merge; a word that is in the
vocabulary as it stands can be looked up in one go (``ignore_merges``). The tokens are the same where every token's own
text is merged to that token.
"""

from __future__ import annotations

import tokenizers
from tokenizers import models


def look_up_whole_words(backend: tokenizers.Tokenizer) -> bool:
    """Let ``backend`` look words up before it merges them if that gives the same tokens for every text; say whether it
    does.

    All tokens are tried, which takes 2 to 5 microseconds each. Added tokens need not be merged to themselves: they are
    taken out of a text before it is cut into words, but for those that are found at the borders of words only.
    """
    model = backend.model
    if not isinstance(model, models.BPE) or model.dropout:
        return False
    if model.ignore_merges:
        return True
    taken_out = {token.content for token in backend.get_added_tokens_decoder().values() if not token.single_word}
    vocabulary = backend.get_vocab(with_added_tokens=False)
    is_same = all(
        [token.id for token in model.tokenize(text)] == [index]
        for text, index in vocabulary.items()
        if text not in taken_out
    )
    model._clear_cache()  # of the words that were tried: it would take no others
    model.ignore_merges = is_same
    return is_same
