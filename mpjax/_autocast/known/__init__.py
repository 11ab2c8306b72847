"""Facts of values and operations, found before anything is decided: they hold in any dtype."""
