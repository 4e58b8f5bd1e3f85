//! Functions: how many arguments they take and how long they are.

use super::Violation;
use crate::workspace::{RustFile, Workspace};
use syn::spanned::Spanned;
use syn::visit::Visit;

/// Most arguments of a function, `self` included.
const MOST_ARGUMENTS: usize = 6;

/// One function of a file.
pub(super) struct Function {
    /// Its name.
    pub(super) name: String,
    /// Line of its name.
    pub(super) line: usize,
    /// Arguments, `self` included.
    pub(super) arguments: usize,
    /// Lines from signature to closing brace; 0 for a declaration.
    pub(super) lines: usize,
}

/// Every function of a file, nested ones and trait methods included.
pub(super) fn functions(file: &RustFile) -> Vec<Function> {
    struct Functions(Vec<Function>);
    impl Functions {
        fn push(&mut self, signature: &syn::Signature, block: Option<&syn::Block>) {
            let first = signature.span().start().line;
            self.0.push(Function {
                name: signature.ident.to_string(),
                line: signature.ident.span().start().line,
                arguments: signature.inputs.len(),
                lines: block.map_or(0, |b| b.span().end().line + 1 - first),
            });
        }
    }
    impl<'ast> Visit<'ast> for Functions {
        fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
            self.push(&item.sig, Some(&item.block));
            syn::visit::visit_item_fn(self, item);
        }
        fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
            self.push(&item.sig, Some(&item.block));
            syn::visit::visit_impl_item_fn(self, item);
        }
        fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
            self.push(&item.sig, item.default.as_ref());
            syn::visit::visit_trait_item_fn(self, item);
        }
    }
    let mut functions = Functions(Vec::new());
    functions.visit_file(&file.tree);
    functions.0
}

/// No function takes more than six arguments.
pub(super) fn check_arguments(workspace: &Workspace) -> Vec<Violation> {
    let mut found = Vec::new();
    for file in &workspace.rust {
        for function in functions(file)
            .into_iter()
            .filter(|f| f.arguments > MOST_ARGUMENTS)
        {
            let message = format!(
                "{} takes {} arguments, {MOST_ARGUMENTS} at most",
                function.name, function.arguments
            );
            found.push(Violation::at(&file.path, function.line, message));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::check_arguments;
    use crate::tidy::planted;

    const SEVEN: &str = "(a: u8, b: u8, c: u8, d: u8, e: u8, f: u8, g: u8)";

    #[test]
    fn function_of_seven_arguments_is_found_wherever_it_stands() {
        for text in [
            format!("fn f{SEVEN} {{}}"),
            format!("struct S; impl S {{ fn f{SEVEN} {{}} }}"),
            format!("trait T {{ fn f{SEVEN}; }}"),
            format!("mod m {{ fn outer() {{ fn f{SEVEN} {{}} }} }}"),
        ] {
            let found = check_arguments(&planted::workspace(&[(
                "crates/lora-config/src/a.rs",
                &text,
            )]));
            assert_eq!(found.len(), 1, "{text}");
            assert!(found[0].message.contains("7 arguments"), "{}", found[0]);
        }
    }

    #[test]
    fn self_counts() {
        let text = "struct S; impl S { fn f(&self, a: u8, b: u8, c: u8, d: u8, e: u8, f: u8) {} }";
        assert_eq!(
            check_arguments(&planted::workspace(&[(
                "crates/lora-config/src/a.rs",
                text
            )]))
            .len(),
            1
        );
    }
}
