//! Tensor names.

use super::model;
use lora_weights::{ModuleSet, NameRules, classify_key, classify_overlay_key, is_gdn_key};

/// A byte that names a model, a byte of rules, then a name.
pub(super) fn tensor_names(data: &[u8]) {
    let [which, flags, name @ ..] = data else {
        return;
    };
    let name = String::from_utf8_lossy(name);
    let spec = model(*which);
    let rules = NameRules {
        modules: if flags & 1 == 0 {
            ModuleSet::default()
        } else {
            ModuleSet::everything()
        },
        accept_bare_names: flags & 2 != 0,
    };
    is_gdn_key(&name);
    let overlay = classify_overlay_key(&name, &rules);
    match classify_key(&name, spec, &rules) {
        Ok((layer, target, _)) => {
            assert!(layer < spec.layers.len(), "layer {layer}");
            assert!(target.dims(spec, layer).is_some(), "{target:?} has no size");
            assert!(overlay.is_none(), "a pair and a table at once");
        }
        Err(reject) => {
            let said = reject.to_string();
            assert!(said.starts_with("REJECT["), "{said}");
            assert!(said.contains(reject.reason.as_str()), "{said}");
        }
    }
}
