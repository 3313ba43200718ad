"""What a plan predicts, from the record of its simulated step."""

from elixir_compile.ir.kinds import OpId
from elixir_compile.ir.plan import Prediction
from elixir_compile.ir.record import Record
from elixir_compile.simulate.exposure import exposed_s, hidden_share


def prediction_of(record: Record, device_peak_bytes: int, device_peak_at: OpId) -> Prediction:
    """Return the prediction that `record` makes, with a peak that was counted by op."""
    return Prediction(
        step_s=record.step_s,
        exposed_s=exposed_s(record),
        hidden_share=hidden_share(record),
        device_peak_bytes=device_peak_bytes,
        device_peak_at=device_peak_at,
        host_peak_bytes=record.host_peak_bytes,
    )
