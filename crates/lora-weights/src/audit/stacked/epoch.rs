//! What a stacked A covers, by the PEFT version that wrote it.

use crate::StackedLayout;
use lora_config::{MoeSpec, PeftVersion, StackedAxes};

/// What A covers in files of a PEFT version, for parameters whose shapes do not tell.
///
/// | PEFT | `[E, out, in]` | `[E, in, out]`, `is_transposed` (GPT-OSS) | `[E, in, out]`, not so marked (Llama 4) |
/// |---|---|---|---|
/// | 0.17, 0.18 | out | in | in |
/// | 0.19.0 | out | out | in |
/// | from 0.19.1 | in | in | out |
///
/// A build before a release may write what its neighbours on either side do: `None` where they differ. `None` too before 0.17,
/// which knows no `target_parameters`.
pub(super) fn layout_of_version(version: PeftVersion, moe: &MoeSpec) -> Option<StackedLayout> {
    let release = PeftVersion {
        pre_release: false,
        ..version
    };
    let settled = layout_of_release(release, moe)?;
    let neighbour = |before: PeftVersion| layout_of_release(before, moe) == Some(settled);
    let before = match (version.major, version.minor, version.patch) {
        (0, 19, 0) => PeftVersion::release(0, 18, 1),
        (0, 19, 1) => PeftVersion::release(0, 19, 0),
        _ => release,
    };
    (!version.pre_release || neighbour(before)).then_some(settled)
}

fn layout_of_release(version: PeftVersion, moe: &MoeSpec) -> Option<StackedLayout> {
    let out_in = moe.stacked_axes == StackedAxes::OutIn;
    let covers_out = if version < PeftVersion::release(0, 17, 0) {
        return None;
    } else if version < PeftVersion::release(0, 19, 0) {
        out_in
    } else if version < PeftVersion::release(0, 19, 1) {
        out_in || moe.is_transposed
    } else {
        !out_in && !moe.is_transposed
    };
    Some(if covers_out {
        StackedLayout::AOut
    } else {
        StackedLayout::AIn
    })
}
