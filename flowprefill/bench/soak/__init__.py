"""`flowprefill bench soak`: mixed traffic, faults and kills for minutes, and what comes of it."""
