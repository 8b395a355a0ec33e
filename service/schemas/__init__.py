"""What requests look like, one file per dialect: pydantic models that say what is wrong with a body in the caller's words."""
