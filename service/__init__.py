"""The HTTP service: routes, schemas, scheduling, the wire. Reaches torch only through `models`."""
