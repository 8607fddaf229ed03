"""Models on disk: versions, inspection, and the commands that change them."""
