"""A client of `calm-beam serve`: sends a prompt, again as a stream, and prints at which layer each token exited.

After `pip install openai`, and `calm-beam serve --manifest=calibration --consistency=textual --delta=0.05`:

    python client.py --url=http://localhost:8000 'Do they want to repair their car?'
"""

import argparse

import openai


def main() -> None:
    """Prints the answer to a prompt, and its tokens as they are made."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("prompt")
    parser.add_argument("--url", default="http://localhost:8000")
    flags = parser.parse_args()
    client = openai.OpenAI(base_url=f"{flags.url}/v1", api_key="none")
    model = client.models.list().data[0].id

    completion = client.completions.create(model=model, prompt=flags.prompt)
    (choice,) = completion.choices
    # Fields that OpenAI's interface does not define are in a field of their own.
    about = choice.model_extra["calm_beam"]
    print(f"{choice.text}\n{about['layers_saved']} of {about['num_layers'] * len(about['tokens'])} layers saved")

    for event in client.completions.create(model=model, prompt=flags.prompt, stream=True):
        (part,) = event.choices
        about = part.model_extra["calm_beam"]
        if part.finish_reason is None:
            print(f"{part.text}[{about['exit_layer']}]", end="", flush=True)
    print()

    try:
        client.completions.create(model=model, prompt=flags.prompt, temperature=1)
    except openai.BadRequestError as error:
        print(f"{error.code}: {error.body}")


if __name__ == "__main__":
    main()
