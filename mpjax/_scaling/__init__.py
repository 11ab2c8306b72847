"""Loss scales: gradients of a scaled loss, unscaled, and steps that are skipped."""
