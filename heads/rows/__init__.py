"""Class rows: their initial values, formats, rounding and fused updates."""
