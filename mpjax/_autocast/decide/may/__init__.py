"""May be low: permissions, each of which can be taken back.

Without a permission nothing is lower than with it, and every law still holds: what cannot be proved
harmless stays float32. `Settings.may` holds the names of those that are granted.
"""

STREAMS = "streams"
"""A sum of a low residual stream and a float32 branch is low."""
STREAM_CARRIES = "stream carries"
"""A recurrent carry that is the stream of a stack of layers is low."""
NORMS = "norms"
"""A normalised value is low where it is stored, or joins a stream, before the next product."""
READ = "read"
"""A float32 result that only products and harmless operations read is low."""
ALL = frozenset({STREAMS, STREAM_CARRIES, NORMS, READ})
