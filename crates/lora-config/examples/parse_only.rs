//! The parser alone: what an adapter does to which module of a model, with no tensor read:
//! `cargo run -p lora-config --example parse_only`.

use lora_config::{ModelSpec, ParseOptions, parse_peft_adapter_config};

const ADAPTER: &str =
    include_str!("../../../tests/data/cases/llama_patterns/adapter/adapter_config.json");
const MODEL: &str = include_str!("../../../tests/data/cases/llama_patterns/config.json");

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = ModelSpec::from_hf_config(MODEL)?;
    // A refusal lists everything that is wrong with the file at once.
    let adapter = parse_peft_adapter_config(ADAPTER, &ParseOptions::default())?;
    for warning in adapter.warnings() {
        println!("{warning}");
    }
    for layer in 0..model.layers.len() {
        for module in ["self_attn.q_proj", "mlp.up_proj", "mlp.down_proj"] {
            // Patterns of ranks and alphas are matched against the whole name, as PEFT does.
            let name = format!("model.layers.{layer}.{module}");
            let of = adapter.module(&name);
            println!(
                "{name}: rank {}, alpha {}, scaling {}",
                of.rank, of.alpha, of.scaling
            );
        }
    }
    assert_eq!(adapter.module("model.layers.1.self_attn.q_proj").rank, 5);
    assert_eq!(adapter.scaling("model.layers.1.mlp.down_proj"), 12.0 / 4.0);
    Ok(())
}
