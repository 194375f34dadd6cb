"""Builds the optional C extension. `pyproject.toml` contains all other settings."""

from setuptools import Extension, setup

_HEADERS = ("jconfig", "jmorecfg", "jpeglib")

# If there is no C compiler, kway is installed without it and works the same, but more slowly.
setup(
    ext_modules=[
        # OpenCV decodes whole JPEGs instead (data/images/jpeg_crop.py).
        Extension(
            "data.images._jpeg",
            ["data/images/_jpeg.c"],
            depends=[f"data/images/libjpeg/{name}.h" for name in _HEADERS],
            optional=True,
        ),
    ]
)
