from engine.draw_batches import DrawBatches
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence


def sequence(num_tokens: int, seed: int, choice: int = 0, **params: object) -> Sequence:
    return Sequence("r", [1] * num_tokens, SamplingParams(max_tokens=None, **params), (), seed, 10**6, choice)


def test_rows_are_told_as_a_backend_wants_them() -> None:
    sequences = [
        sequence(3, -1, 2, temperature=0.5, top_k=-1, top_p=0.9, min_p=0.1),
        sequence(5, 2**64 - 2, temperature=1e-6, top_k=7),
        sequence(4, 9, temperature=1e300),
    ]
    batch = DrawBatches().of(sequences)
    assert batch.temperatures.tolist() == [0.5, 0.0, 3.4028234663852886e38]
    assert batch.top_ks.tolist() == [0, 7, 0]
    assert batch.top_ps.tolist() == [0.9, 1.0, 1.0]
    assert batch.min_ps.tolist() == [0.1, 0.0, 0.0]
    assert batch.seeds.tolist() == [-1, -2, 9]
    assert batch.choices.tolist() == [2, 0, 0]
    assert batch.positions.tolist() == [3, 5, 4]


def test_of_the_same_sequences_only_the_positions_are_made_again() -> None:
    batches, sequences = DrawBatches(), [sequence(3, 1), sequence(5, 2)]
    first = batches.of(sequences)
    sequences[1].token_ids.append(7)
    assert batches.of(sequences) is first
    assert first.positions.tolist() == [3, 6]
    other = batches.of(sequences[:1])
    assert (other.positions.tolist(), other.seeds.tolist()) == ([3], [1])
