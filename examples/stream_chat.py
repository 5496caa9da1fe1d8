"""A chat with a server, streamed: start one with `octavo serve`."""

import sys

from octavo import Client


def main(url: str = "http://127.0.0.1:8000", question: str = "What is 2+2?") -> None:
    with Client(url) as client:
        for piece in client.stream_chat([{"role": "user", "content": question}], max_tokens=64):
            print(piece.text, end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
