"""The seams: one small Protocol a file, with the implementations that this release ships."""
