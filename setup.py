"""Builds the optional C extension. `pyproject.toml` contains all other settings."""

from setuptools import Extension, setup

_HEADERS = ("jconfig", "jmorecfg", "jpeglib")

setup(
    ext_modules=[
        Extension(
            "data.images._jpeg",
            ["data/images/_jpeg.c"],
            depends=[
                f"data/images/libjpeg/{name}.h" for name in ("jconfig", "jmorecfg", "jpeglib")
            ],
            # Without a C compiler, OpenCV decodes whole JPEGs (data/images/jpeg_crop.py).
            optional=True,
        )
    ]
)
