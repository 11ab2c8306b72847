"""Parts of a train step: checks, micro-batches, histories, reports."""
