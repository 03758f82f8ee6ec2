"""The most that images, videos and sounds of one request may be; docs/images.md explains them to users."""

from __future__ import annotations

MAX_ITEMS = 64  # images, videos and sounds of a prompt
MAX_FRAMES = 768  # of a video
MAX_FILE_BYTES = 32 << 20  # of an image's file
MAX_FETCH_SECONDS = 10  # for an image that is fetched
MAX_PROMPT_FETCH_SECONDS = 30  # for all that are fetched of a prompt
MAX_PIXELS = 1 << 26  # of an image, by its header: 8192 by 8192
MAX_PROMPT_PIXELS = 1 << 28  # of all images and frames of a prompt
MAX_SOUND_SECONDS = 3600.0  # of all sounds of a prompt; sound.py bounds a file
MAX_SECONDS = 30  # of processor time for a prompt's images and sounds, decoding and preparing together
MAX_MEMORY = 8 << 30  # bytes that the process which decodes may write to
MAX_TENSOR_BYTES = 1 << 30  # that a prompt's images become
MAX_HELD_BYTES = 4 << 30  # of a server's requests that wait: above it further images are refused
