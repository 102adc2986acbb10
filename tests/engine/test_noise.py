from engine.noise import POSITIONS_AHEAD, Noise
from engine.philox import uniforms
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence


def test_numbers_made_ahead_are_those_of_seed_choice_and_position() -> None:
    """In changing company, over several stretches, and when a sequence is read again from before."""
    noise = Noise()
    first, second = (
        Sequence("r", [1] * n, SamplingParams(), (), seed=n, max_output_tokens=9, choice=n) for n in (2, 5)
    )
    for step in range(2 * POSITIONS_AHEAD + 3):
        asked = [first, second] if step % 3 else [second]
        expected = uniforms([s.seed for s in asked], [s.choice for s in asked], [s.num_tokens for s in asked])
        assert noise.of(asked) == expected.tolist()
        first.token_ids.append(7)
        second.token_ids.append(7)
    del first.token_ids[4:]
    assert noise.of([first]) == uniforms([2], [2], [4]).tolist()
