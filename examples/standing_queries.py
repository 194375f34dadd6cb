"""Asks a server about the classes of each image that arrives in a folder, and stores the hits.

    python examples/standing_queries.py http://127.0.0.1:8000 FRAMES HITS.jsonl husky samoyed

The names of frames must be ascending, such as `frame-000017.jpg`. Write a frame under a name that
begins with a dot, and rename it when it is complete. HITS.jsonl gets one line per frame, so that
the program resumes after its last frame if it is started again:

    {"frame": "frame-000017.jpg", "version": "0b1d6a3f", "hits": [{"class": "husky", "score": 3.2}]}
"""

import json
import sys
import time
from pathlib import Path

from serving.client import Client, RejectedError


def main(url: str, frames: str, output: str, *classes: str) -> None:
    with Client(url) as client, Path(output).open("a+b") as file:
        file.seek(0)
        written = file.read()
        file.truncate(written.rfind(b"\n") + 1)  # a kill can leave an incomplete line
        lines = written.split(b"\n")[:-1]
        last, served = json.loads(lines[-1])["frame"] if lines else ".", client.served()
        while True:
            new = [path for path in Path(frames).iterdir() if path.name > last]
            for frame in sorted(path for path in new if not path.name.startswith(".")):
                try:
                    answer = client.query(classes, [frame], recall=0.9, served=served)
                    matches = [one for one in answer.results[0].verdicts if one.match]
                    hits = [{"class": one.class_name, "score": one.score} for one in matches]
                    line = {"frame": frame.name, "version": answer.version, "hits": hits}
                except RejectedError as error:  # for example, the frame is not an image
                    line = {"frame": frame.name, "error": error.reason}
                file.write(json.dumps(line).encode() + b"\n")
                file.flush()
                last = frame.name
            time.sleep(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
