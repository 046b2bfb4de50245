"""Frames of the inter-process protocols."""


class MalformedFrameError(ValueError):
    """A frame that does not parse, or whose parts do not fit together. It is counted, logged and dropped."""
