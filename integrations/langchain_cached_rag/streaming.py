"""An engine's stream in an event loop. Knows threads; knows nothing of what is streamed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from cached_rag import Stream


async def whole(stream: Stream) -> str:
    """All pieces, without blocking the loop; a cancelled task stops the generation."""
    try:
        return await asyncio.to_thread("".join, stream)
    except asyncio.CancelledError:
        stream.cancel()
        raise


async def pieces(stream: Stream) -> AsyncGenerator[str, None]:
    """Piece by piece, each when it is made; whoever stops asking stops the generation."""
    try:
        while (piece := await asyncio.to_thread(next, stream, None)) is not None:
            yield piece
    finally:
        stream.cancel()
        await asyncio.to_thread(stream.close)
