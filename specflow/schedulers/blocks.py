"""KV blocks: who owns which. Block 0 is never handed out: padded rows and out-of-range positions write there."""

import heapq

from specflow.core.request import Request


class BlockAllocator:
    """Hands out block numbers 1 … num_blocks-1, in a row for one request where it can, and takes them back."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_usable = num_blocks - 1
        self._free = set(range(1, num_blocks))
        self._lowest = list(range(1, num_blocks))  # heap; may hold numbers that are taken meanwhile

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Make the request's blocks cover num_tokens positions; False, and nothing changed, when too few are free."""
        missing = self.blocks_for(num_tokens) - len(request.blocks)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            request.blocks.append(self._take(request.blocks[-1] + 1 if request.blocks else 0))
        return True

    def release(self, request: Request) -> None:
        """Take back all blocks of a request."""
        for block in request.blocks:
            self._free.add(block)
            heapq.heappush(self._lowest, block)
        request.blocks.clear()

    def _take(self, wanted: int) -> int:
        """The next block in a row if it is free (a single request then reads its pages as a view), else the lowest."""
        if wanted not in self._free:
            while (wanted := heapq.heappop(self._lowest)) not in self._free:
                pass
        self._free.remove(wanted)
        return wanted
