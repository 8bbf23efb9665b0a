"""Keys of KV blocks: one digest per full block, over its tokens and all before it. No torch.

K and V of a token depend on every token before it, so a block can be shared exactly where the whole
prefix is the same. A cryptographic digest, because BlockPool trusts a key without looking at the
tokens: with a hash that can be made to collide, a prompt could be built that is answered from the
K and V of another user's text.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

KEY_BYTES = 16


def prefix_keys(
    token_ids: Sequence[int], block_size: int, known: Sequence[bytes] = (), salt: bytes = b""
) -> tuple[bytes, ...]:
    """Keys of the full blocks of a sequence, in order; a partly filled last block has none.

    known: keys of its leading blocks, from an earlier call with the same salt: only the rest is
        computed
    salt: sequences share keys only under the same salt (a tenant, an adapter)
    """
    num_blocks = len(token_ids) // block_size
    assert len(known) <= num_blocks, f"{len(known)} keys for {num_blocks} full blocks"
    if len(known) == num_blocks:
        return tuple(known)
    tokens = array("I", token_ids[len(known) * block_size : num_blocks * block_size])
    packed, width = tokens.tobytes(), block_size * tokens.itemsize
    # `person` sets the start apart: no salt can be chosen to continue somebody's chain.
    key = known[-1] if known else blake2b(salt, digest_size=KEY_BYTES, person=b"salt").digest()
    keys = list(known)
    for start in range(0, len(packed), width):
        key = blake2b(key + packed[start : start + width], digest_size=KEY_BYTES).digest()
        keys.append(key)
    return tuple(keys)
