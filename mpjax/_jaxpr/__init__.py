"""Programs as data: what each primitive is, how equations are bound, which programs they hold."""
